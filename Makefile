# `make demo`, `make test`, `make test-all`, `make compile` and `make docs` do everything. Each makes .venv first, if it
# is not there.

VENV ?= .venv
JAX ?= jax
PYTEST_ARGS ?= -n 2 --dist worksteal
# `make test` runs the first and the last case of each test, and one in so many of the others.
EVERY ?= 6
SELECTED ?= tests/mosaic -m compiles
PYTHON ?= $(firstword $(foreach p,python3 python3.14 python3.13 python3.12 python,\
	$(shell $(p) -c 'import sys; sys.version_info >= (3, 12) and print("$(p)")' 2>/dev/null)))

# Tests start many processes that import jax: with its bytecode written, a second instead of three.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all compile lint docs clean

demo: $(VENV)/.installed
	$(VENV)/bin/python examples/train_transformer.py $(ARGS)

test: $(VENV)/.installed
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS) --every $(EVERY) $(ARGS)

# All cases. `make test ARGS=--rest` runs those that `make test` leaves out.
test-all: $(VENV)/.installed
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS) $(ARGS)

# Compiles kernels for GPUs that need not be here.
compile: $(VENV)/cuda/.installed
	JAX_PLATFORMS=cpu PYTHONPATH=$(VENV)/cuda $(VENV)/bin/python -m pytest $(PYTEST_ARGS) $(SELECTED) $(ARGS)

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

docs: $(VENV)/.installed
	JAX_PLATFORMS=cpu $(VENV)/bin/python -m sphinx -b html -W --keep-going -q docs build/docs
	@echo build/docs/index.html

# --no-compile: Python compiles what is imported, a part of what is installed, and does so in parallel.
$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "jaxnorm needs Python 3.12 or newer; the newest found here is" \
		"$$(python3 --version 2>&1 || echo none). Install one, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(VENV)/bin/python -m pip install --quiet --no-compile --editable ".[examples]" --group dev "$(JAX)"
	@touch $@

# A place of their own: where jax finds a plugin for GPUs, it is no longer the jax that `make test` tests.
$(VENV)/cuda/.installed: $(VENV)/.installed
	$(VENV)/bin/python -c 'import jax; print("jax-cuda13-plugin==" + jax.__version__)' > $(VENV)/cuda.txt
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(VENV)/cuda \
		--group compile --constraint $(VENV)/cuda.txt
	@mkdir -p $(@D) && touch $@

clean:
	rm -rf $(VENV) dist build
