# `make demo`, `make test` and `make lint` need only Python 3.11 or newer; all they use is in .venv.

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& command -v $$p && break; done)
PIP := .venv/bin/python -m pip install --quiet --disable-pip-version-check
JOBS ?= 2
export JAX_PLATFORMS ?= cpu

.PHONY: demo test slow lint format clean

demo: .venv/with-core
	.venv/bin/python examples/gemm.py

test: .venv/with-test
	.venv/bin/python -m pytest -n $(JOBS) -m "not slow"

slow: .venv/with-test
	.venv/bin/python -m pytest -n $(JOBS) -m slow

lint: .venv/with-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright --pythonpath .venv/bin/python

format: .venv/with-dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf .venv build *.egg-info

# The environment is made anew when what it holds has changed, and only then.
.venv/with-core: setup.cfg
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer with venv was found; say make PYTHON=..." >&2; exit 1; }
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	@touch $@

.venv/with-test: .venv/with-core
	$(PIP) --editable '.[test]'
	@touch $@

.venv/with-dev: .venv/with-test
	$(PIP) --editable '.[dev]'
	@touch $@
