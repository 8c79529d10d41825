# Needs Python >= 3.10 with its headers, a C compiler and make. Everything goes into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# setuptools warns of every editable install, and newer versions of pip pass it on.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --disable-pip-version-check --quiet

SOURCES := $(wildcard csrc/*.c)
HEADERS := $(wildcard csrc/*.h)
OBJECTS := $(SOURCES:csrc/%.c=build/lint/%.o)
BUILT := $(VENV)/built
BENCH_MODEL ?= build/glm-bench-8g
CHECKED := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all
SANITIZED := encoder checksum quantize convert repack session together saved residency resident mirror mtp laws \
    bits fuzz_container kernels

.PHONY: demo test search lint sanitize docs bench package clean exactness bench-spec soak

## demo: install, then let the embedded model answer
demo: $(BUILT)
	$(BIN)/colibri run --prompt "Tell me a story about a fox."

## test: everything that must hold; three at a time, since tests of commands wait half of their time
test: $(VENV)/tools
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

## search: the tests that draw their examples, with new ones each time
search: $(VENV)/tools
	$(BIN)/python -m pytest -n 2 -m hypothesis --hypothesis-profile=search

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

## sanitize: kernels, then the whole core under its tests, with address and undefined-behaviour checks
sanitize: build/test_kernels build/sanitize/colibri/_core.abi3.so $(VENV)/tools
	build/test_kernels
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc PYTHONSAFEPATH=1 PYTHONPATH=build/sanitize \
	    $(BIN)/pytest $(SANITIZED:%=tests/test_%.py)

## docs: write what is generated: docs/knobs.md, and the list of files in docs/structure.md
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
# Pip does not compile such sources, and where PYTHONDONTWRITEBYTECODE is set nothing else would.
$(BUILT): $(VENV)/made pyproject.toml setup.py csrc/build.py $(SOURCES) $(HEADERS)
	@echo "compiling the core and installing what it needs: some minutes, once"
	$(PIP) install --no-build-isolation --editable .
	$(BIN)/python -m compileall -q colibri
	@touch $@

$(VENV)/tools: $(BUILT)
	$(PIP) install --no-build-isolation --editable ".[test,lint]"
	@touch $@

$(BENCH_MODEL)/config.json: | $(BUILT)
	$(BIN)/python tools/make_bench_model.py $(BENCH_MODEL)

build/test_kernels: tests/c/test_kernels.c $(SOURCES) $(HEADERS)
	@mkdir -p build
	$(CC) -std=c11 $(CHECKED) -ffp-contract=off -Wall -Wextra -Werror -Icsrc -o $@ \
	    tests/c/test_kernels.c $(wildcard csrc/kernels*.c) csrc/angles.c -lm

# The package again, with a core that checks itself; Python loads it from PYTHONPATH.
build/sanitize/colibri/_core.abi3.so: $(SOURCES) $(HEADERS) $(wildcard colibri/*.py) \
    $(wildcard colibri/*/*.py) build/lint/flags
	@rm -rf build/sanitize && mkdir -p build/sanitize
	cp -r colibri build/sanitize/ && rm -f build/sanitize/colibri/_core*
	$(BIN)/python -c 'import sys; sys.path.insert(0, "csrc"); import build; \
	    build.ffi.emit_c_code("build/sanitize/core.c")'
	$(CC) $$(cat build/lint/flags) $(CHECKED) -shared -fPIC -Icsrc \
	    -I$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))') \
	    -o $@ $(SOURCES) build/sanitize/core.c -lm

# The flags of the real build, warnings as errors.
build/lint/flags: csrc/build.py | $(VENV)/made
	@mkdir -p build/lint
	@$(BIN)/python -c 'import sys; sys.path.insert(0, "csrc"); import build; print(*build.FLAGS)' > $@

build/lint/%.o: csrc/%.c $(HEADERS) build/lint/flags
	$(CC) $$(cat build/lint/flags) -Werror -c $< -o $@
