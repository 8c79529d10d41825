# Needs Python >= 3.10 with its headers, a C compiler and make. Everything goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

SOURCES := $(wildcard csrc/*.c)
HEADERS := $(wildcard csrc/*.h)
OBJECTS := $(SOURCES:csrc/%.c=build/lint/%.o)
BUILT := $(VENV)/built
BENCH_MODEL ?= build/glm-bench-8g

.PHONY: demo test lint sanitize docs bench package clean exactness bench-spec soak

## demo: install, then let the embedded model answer
demo: $(BUILT)
	$(BIN)/colibri run --prompt "Tell me a story about a fox."

## test: everything that must hold
test: $(VENV)/tools
	$(BIN)/python -m pytest -n 2

## lint: style, documents that match the code, a core that compiles without a warning
lint: $(VENV)/tools $(OBJECTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/make_docs.py --check

## soak: the server under 400 requests of clients that come and go: right text, flat memory
soak: $(VENV)/tools
	$(BIN)/python -m pytest -m slow tests/test_server_load.py

## exactness: 100 prompts x 256 tokens: the same text with any drafter at any depth
exactness: $(BUILT)
	$(BIN)/python tools/exactness.py

## bench-spec: tokens a second by draft depth, paired and interleaved; fails below its bars
bench-spec: $(BUILT)
	$(BIN)/python tools/bench_spec.py --slots 8

## sanitize: the kernels under address and undefined-behaviour sanitizers
sanitize:
	@mkdir -p build
	$(CC) -std=c11 -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all \
	    -ffp-contract=off -Wall -Wextra -Werror -Icsrc -o build/test_kernels \
	    tests/c/test_kernels.c $(wildcard csrc/kernels*.c) csrc/angles.c -lm
	build/test_kernels

## docs: write what is generated: docs/knobs.md
docs: $(BUILT)
	$(BIN)/python tools/make_docs.py

## bench: measure this machine and the engine, on a model written once (BENCH_MODEL=DIR, 10 GB)
bench: $(BUILT) $(BENCH_MODEL)/config.json
	$(BIN)/colibri bench $(BENCH_MODEL) --busy --json build/bench.json

## package: sdist and wheel in dist/, their contents checked, the wheel tried in a clean venv
package: $(BUILT)
	$(BIN)/python tools/check_package.py

clean:
	rm -rf build dist *.egg-info colibri/_core*.so $(VENV)

# --- how ------------------------------------------------------------------------------------

$(VENV)/made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "colibri needs Python 3.10")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install "setuptools>=77" "cffi>=1.16"
	@touch $@

# Editable, so that Python sources are used as they are; the core is compiled again when it changed.
$(BUILT): $(VENV)/made pyproject.toml setup.py csrc/build.py $(SOURCES) $(HEADERS)
	$(PIP) install --no-build-isolation --editable .
	@touch $@

$(VENV)/tools: $(BUILT)
	$(PIP) install --no-build-isolation --editable ".[test,lint]"
	@touch $@

$(BENCH_MODEL)/config.json: | $(BUILT)
	$(BIN)/python tools/make_bench_model.py $(BENCH_MODEL)

# The flags of the real build, warnings as errors.
build/lint/flags: csrc/build.py | $(VENV)/made
	@mkdir -p build/lint
	@$(BIN)/python -c 'import sys; sys.path.insert(0, "csrc"); import build; print(*build.FLAGS)' > $@

build/lint/%.o: csrc/%.c $(HEADERS) build/lint/flags
	$(CC) $$(cat build/lint/flags) -Werror -c $< -o $@
