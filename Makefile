# Two commands do everything: `make lab` runs the grid of layouts, `make test` runs the tests.
# Both create .venv and install what they need; a second run reuses it, until pyproject.toml changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -q --no-input --disable-pip-version-check
VENV_MADE := $(VENV)/.made
TRAIN := $(VENV)/.train-installed
DEV := $(VENV)/.dev-installed

# One thread per process: the tests start many ranks on few cores.
RUN_TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Cheapest first: one process, then forked ranks.
TESTS := tests/unit tests/rules tests/golden tests/ranks tests/museum

.PHONY: help lab test test-all lint format clean

help:
	@echo "make lab       train a small model under every layout up to 8 ranks, verify each, write report.html"
	@echo "               (options of 'fivefold lab' go in ARGS: make lab ARGS='--max-ranks 4')"
	@echo "make test      the tests, cheapest first (options of pytest go in ARGS: make test ARGS='-k layout';"
	@echo "               a part of them: make test TESTS=tests/unit/core)"
	@echo "make test-all  the same with the whole matrix of layouts and models; run again, it goes on where it was stopped"
	@echo "make lint      ruff and mypy"
	@echo "make format    let ruff format the code and fix what it can"
	@echo "make clean     remove the environment and caches; records and reports stay"

lab: $(TRAIN)
	@$(BIN)/fivefold lab $(ARGS)

test: $(DEV)
	$(RUN_TESTS) $(TESTS) $(ARGS)

test-all: $(DEV)
	$(RUN_TESTS) $(TESTS) --exhaustive --resume $(ARGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .test_resume .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV_MADE):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || { \
	  echo "Fivefold needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2> /dev/null || echo not there)." \
	    "Name one: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu it comes with the package python3-venv" >&2; \
	  exit 1; }
	@touch $@

$(TRAIN): pyproject.toml | $(VENV_MADE)
	@echo "installing fivefold[train] into $(VENV); the first time this takes some minutes, most of it for torch"
	@$(PIP_INSTALL) -e '.[train]'
	@touch $@

$(DEV): pyproject.toml | $(VENV_MADE)
	@echo "installing fivefold[train,dev] into $(VENV); the first time this takes some minutes, most of it for torch"
	@$(PIP_INSTALL) -e '.[train,dev]'
	@touch $(TRAIN) $@
