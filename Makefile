# Needs Python >= 3.10 with its headers, a C compiler and make. Everything goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

SOURCES := $(wildcard csrc/*.c)
HEADERS := $(wildcard csrc/*.h)
OBJECTS := $(SOURCES:csrc/%.c=build/lint/%.o)
BUILT := $(VENV)/built

.PHONY: demo test lint sanitize docs package clean

## demo: install, then let the embedded model answer
demo: $(BUILT)
	$(BIN)/colibri run --prompt "Tell me a story about a fox."

## test: everything that must hold
test: $(VENV)/tools
	$(BIN)/python -m pytest

## lint: style, documents that match the code, a core that compiles without a warning
lint: $(VENV)/tools $(OBJECTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/make_docs.py --check

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

# The flags of the real build, warnings as errors.
build/lint/flags: csrc/build.py | $(VENV)/made
	@mkdir -p build/lint
	@$(BIN)/python -c 'import sys; sys.path.insert(0, "csrc"); import build; print(*build.FLAGS)' > $@

build/lint/%.o: csrc/%.c $(HEADERS) build/lint/flags
	$(CC) $$(cat build/lint/flags) -Werror -c $< -o $@
