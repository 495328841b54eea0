# `make quickstart` and `make test` need Python 3.11 or newer with pip, and nothing else.
PYTHON ?= python3
RUN := runs/quickstart
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help venv quickstart test test-slow test-sharded test-plan test-plan-full gpu-check lint clean

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

test: lint  ## the default suite: everything but the marked groups (about 8 minutes on 2 cores)
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: .venv/.installed  ## the slow group: whole runs, killed and resumed
	$(BIN)/python -m pytest -m slow

test-sharded: .venv/.installed  ## whole optimizer steps on six meshes of eight fake devices
	$(BIN)/python -m pytest -m sharded

.venv-plan/.installed: pyproject.toml $(wildcard requirements/*.txt)
	$(PYTHON) -m venv .venv-plan
	.venv-plan/bin/python -m pip install --quiet --upgrade pip
	@pins=requirements/py$$(.venv-plan/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])').txt; \
	[ -f $$pins ] || pins=/dev/null; .venv-plan/bin/python -m pip install --quiet -c $$pins -e '.[test,plan]'
	@touch $@

test-plan: .venv-plan/.installed  ## compile an update for TPU topologies, without a TPU (libtpu in .venv-plan)
	.venv-plan/bin/python -m pytest -m plan

test-plan-full: .venv-plan/.installed  ## the same for the 30B policy on v5p 4x4x4; a quarter of an hour
	.venv-plan/bin/python -m pytest -m plan_full --timeout 3000

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

clean:  ## remove the environment and caches; runs/ stays
	rm -rf .venv .venv-plan .venv-gpu build *.egg-info .pytest_cache .ruff_cache .hypothesis
