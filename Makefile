# `make quickstart` and `make test` need Python 3.11 or newer with pip, and nothing else.
PYTHON ?= python3
RUN := runs/quickstart
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help venv quickstart lint test test-slow test-parity test-sharded test-multihost test-sglang test-plan test-plan-full test-faults test-extras test-peers soak gpu-check bench clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

venv: .venv/.installed  ## .venv with the pinned, tested set for this Python

.venv/.installed: pyproject.toml $(wildcard requirements/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else f"python: expected 3.11 to 3.13, got {sys.version.split()[0]} ($(PYTHON)); set PYTHON=python3.12, say")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	@pins=requirements/py$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt; \
	if [ -f $$pins ]; then echo "installing $$pins"; $(BIN)/python -m pip install --quiet -r $$pins && $(BIN)/python -m pip install --quiet --no-deps -e .; \
	else echo "no tested set for this Python: installing the newest that pyproject.toml allows"; $(BIN)/python -m pip install --quiet -e '.[test]'; fi
	@touch $@

quickstart: .venv/.installed  ## watch a small MoE policy improve by asynchronous RL (about 4 minutes on 2 cores)
	$(BIN)/sat-jax train configs/quickstart.toml

lint: .venv/.installed  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

test: lint  ## the default suite: everything but the marked groups (about a quarter of an hour on 2 cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: .venv/.installed  ## the slow group: whole runs, killed and resumed
	$(BIN)/python -m pytest -m slow

.venv-peers/.installed: requirements/peers.txt $(wildcard requirements/py3.11.txt)
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet -r requirements/py3.11.txt -r requirements/peers.txt
	.venv-peers/bin/python -m pip install --quiet --no-deps verl==0.9.1 -e .
	@touch $@

test-peers: .venv-peers/.installed  ## optional (Python 3.11, 2.5 GB): our objectives against verl's own functions
	.venv-peers/bin/python -m pytest -m peers tests/peers -W "default"

test-parity: .venv-parity/.installed  ## the policy against transformers, in an environment of its own with PyTorch
	.venv-parity/bin/python -m pytest -m parity tests/parity

.venv-parity/.installed: pyproject.toml $(wildcard requirements/*.txt)
	$(PYTHON) -m venv .venv-parity
	@pins=requirements/py$$(.venv-parity/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt; \
	if [ -f $$pins ]; then .venv-parity/bin/python -m pip install --quiet -r $$pins; fi; \
	.venv-parity/bin/python -m pip install --quiet -e '.[test,parity]'
	@touch $@

test-sharded: .venv/.installed  ## whole optimizer steps on six meshes of eight fake devices
	$(BIN)/python -m pytest -m sharded

test-multihost: .venv/.installed  ## runs of two and four processes over gloo: the same numbers, kills, resumes
	$(BIN)/python -m pytest -m multihost tests/multihost

test-faults: .venv/.installed  ## the seeded part of the fault suite: kills, liars, broken connections
	$(BIN)/python -m pytest -m faults

soak: .venv/.installed  ## the whole fault suite (a quarter of an hour or more); writes docs/soak.md
	$(BIN)/python -m tools.soak

test-extras: .venv/.installed  ## the tests that need the extras math and parquet, which it installs
	$(BIN)/python -m pip install --quiet -e '.[math,parquet]'
	$(BIN)/python -m pytest -m extras

.venv-plan/.installed: pyproject.toml $(wildcard requirements/*.txt)
	$(PYTHON) -m venv .venv-plan
	.venv-plan/bin/python -m pip install --quiet --upgrade pip
	@pins=requirements/py$$(.venv-plan/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt; \
	[ -f $$pins ] || pins=/dev/null; .venv-plan/bin/python -m pip install --quiet -c $$pins -e '.[test,plan]'
	@touch $@

test-plan: .venv-plan/.installed  ## sat-jax plan for TPU topologies, without a TPU (libtpu in .venv-plan; 10 to 20 minutes)
	.venv-plan/bin/python -m pytest -m plan

test-plan-full: .venv-plan/.installed  ## the same for every 30B config on its machine; more than an hour
	.venv-plan/bin/python -m pytest -m plan_full

.venv-gpu/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/python -m pip install --quiet --upgrade pip
	@pins=requirements/py$$(.venv-gpu/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt; \
	[ -f $$pins ] || pins=/dev/null; .venv-gpu/bin/python -m pip install --quiet -c $$pins -e '.[test,cuda]'
	@touch $@

gpu-check:  ## tests and benchmarks that need a GPU: one JSON record; without a GPU it says so (exit code 0)
	@if $(PYTHON) tools/gpu_check.py --only-look; \
	then $(MAKE) --no-print-directory .venv-gpu/.installed && .venv-gpu/bin/python tools/gpu_check.py; \
	else $(PYTHON) tools/gpu_check.py; fi

SGLANG_PYTHON ?= python3.11
SGLANG := .venv-sglang

$(SGLANG)/.installed: tests/sglang_cpu/requirements.txt
	$(SGLANG_PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --no-deps -r $<
	@touch $@

test-sglang: .venv/.installed $(SGLANG)/.installed  ## the real SGLang on a CPU, under the bridge (2.4 GB, once)
	$(BIN)/python -m pytest -m sglang tests/sglang

bench: .venv/.installed  ## the benchmarks of docs/benchmarks.md that need no other environment (a quiet machine, half an hour)
	$(BIN)/sat-jax bench clip
	$(BIN)/sat-jax bench clip --aggregation own
	$(BIN)/sat-jax bench async
	$(BIN)/python tools/bench/bench_bridge.py
	$(BIN)/python tools/bench/bench_kernels.py --what memory
	$(BIN)/python tools/bench/bench_load.py

clean:  ## remove the environments and caches; runs/ stays
	rm -rf .venv .venv-* build *.egg-info .pytest_cache .ruff_cache .hypothesis
