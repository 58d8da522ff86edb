PYTHON ?= python3
BIN := .venv/bin
# Tests run in one process a core: more torch threads than that only get in each other's way.
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-all lint bench docs

setup: .venv/installed

# torch first and pinned: this takes a CPU build where pip knows one, and the dependency below is then met.
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[server,test]'
	touch $@

demo: setup
	$(BIN)/tokenspeed-engine demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n auto -m "not slow and not gpu"

test-all: lint
	$(BIN)/python -m pytest -n auto -m "not gpu"

bench: setup
	$(BIN)/python bench/dispatch.py

# The pages under docs/reference, from the contracts; a test compares them.
docs: setup
	$(BIN)/python -m tokenspeed_kernels.reference_pages docs
