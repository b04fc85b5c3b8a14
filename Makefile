# Needs python3 (3.10 to 3.13) and make, and nothing else: every target makes .venv first and installs what it needs.
#
#   make demo                  the package registry on a local Ray; counts verified
#   make demo ARGS=--chaos     the same, with partition processes killed in the middle
#   make test  lint  bench  soak  clean
#
# ARGS is passed on to the program or to pytest: make test ARGS="tests/unit -x"
# WORKERS is how many pytest workers `make test` has: one for all tests that need a Ray, the others for the rest
# PYTHON is the interpreter that makes the virtual environment: make demo PYTHON=python3.12

PYTHON ?= python3
ARGS ?=
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.DEFAULT_GOAL := help
.PHONY: help demo quickstart test lint bench soak clean

help:
	@sed -n '/^$$/q; s/^# \{0,1\}//p' Makefile

# Written last: an installation that was cut short is started again.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
	  echo "Mainspring needs Python 3.10 to 3.13, and there is no '$(PYTHON)' here. Name one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "Mainspring needs Python 3.10 to 3.13, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) -V) and installing into it; this takes a minute or two" >&2
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON)' can't make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m examples.package_registry $(ARGS)

quickstart: $(STAMP)
	@$(BIN)/python -m examples.quickstart $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadscope --no-loadscope-reorder $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	@$(BIN)/python -m tests.benchmarks.bench_calls $(ARGS)
	@$(BIN)/python -m tests.benchmarks.bench_timers
	@$(BIN)/python -m tests.benchmarks.bench_messages
	@$(BIN)/python -m tests.benchmarks.bench_wake

soak: $(STAMP)
	$(BIN)/python -m pytest -m soak $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find actors drivers timers examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
