PYTHON ?= python3
BIN := .venv/bin
# Tests run in one process a core: more torch threads than that only get in each other's way.
export OMP_NUM_THREADS ?= 1

CLI := $(BIN)/tokenspeed-kernels
ARCHS := sm_90a,sm_100a,sm_103a,gfx950
EVIDENCE := tokenspeed_kernels/triton/evidence
CUDA_EVIDENCE := backends/cuda/tokenspeed_cuda/evidence
OLDEST_TRITON := .venv/triton-3.6

.PHONY: setup demo test test-all test-gpu lint bench docs evidence emulate

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
	$(BIN)/python -m pytest -n auto -m "not slow and not gpu and not compiles"
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -m "compiles and not slow" tests/triton

test-all: lint
	$(BIN)/python -m pytest -n auto -m "not gpu and not compiles"
	TRITON_INTERPRET=0 $(BIN)/python -m pytest -n auto -m compiles tests/triton

# On a machine with an accelerator, where Triton compiles instead of interpreting. Its results are evidence.
test-gpu: setup
	TRITON_INTERPRET=0 TOKENSPEED_GPU_RESULTS=tests/gpu/results/tests.json $(BIN)/python -m pytest -m gpu
	TRITON_INTERPRET=0 $(BIN)/python -m tests.gpu.sanitize tests/gpu/results/sanitizer.json

$(OLDEST_TRITON): | setup
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==3.6.0

# What ships as evidence and needs no device: portable kernels compile for every arch on the oldest and the newest
# Triton and conform in its interpreter; those in CUDA C++ compile for their archs.
evidence: setup $(OLDEST_TRITON)
	$(CLI) compile --backend triton --arch $(ARCHS) --jobs 2 --evidence $(EVIDENCE) > /dev/null
	PYTHONPATH=$(OLDEST_TRITON) $(CLI) compile --backend triton --arch $(ARCHS) --jobs 2 --evidence $(EVIDENCE) > /dev/null
	$(CLI) compile --backend cuda --arch sm_90a,sm_100a,sm_103a --evidence $(CUDA_EVIDENCE) > /dev/null
	TRITON_INTERPRET=1 $(CLI) verify --backend triton --limit 12 --jobs 2 --evidence $(EVIDENCE)

# gfx950 machine code, executed; TINYGRAD_DIR as tests/gfx950/README.md says.
emulate: setup
	TRITON_INTERPRET=0 TOKENSPEED_EVIDENCE=$(EVIDENCE) $(BIN)/python -m pytest tests/gfx950

bench: setup
	$(BIN)/python bench/dispatch.py

# The pages under docs/reference, from the contracts, and the benchmarks, from their results; tests compare them.
docs: setup
	$(BIN)/python -m tokenspeed_kernels.reference_pages docs
	$(BIN)/python -m tokenspeed_kernels.benchmark.page docs/benchmarks.md bench/results
