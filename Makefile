# `make quickstart` and `make test` need Python 3.11 or newer with pip, and nothing else.
PYTHON ?= python3
RUN := runs/quickstart
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help venv quickstart test test-slow test-sglang lint clean

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

SGLANG_PYTHON ?= python3.11
SGLANG := .venv-sglang

$(SGLANG)/.installed: tests/sglang_cpu/requirements.txt
	$(SGLANG_PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python -m pip install --quiet --no-deps -r $<
	@touch $@

test-sglang: .venv/.installed $(SGLANG)/.installed  ## the real SGLang on a CPU, under the bridge (2.4 GB, once)
	$(BIN)/python -m pytest -m sglang tests/sglang

clean:  ## remove the environment and caches; runs/ stays
	rm -rf .venv $(SGLANG) build *.egg-info .pytest_cache .ruff_cache .hypothesis
