# Needs Python 3.11 or newer and pip's package index; everything else is installed into .venv.
#
#   make demo      install, generate from the built-in demo model, then ask a server twice and see its cache at work
#   make test      style and the quick tests: a quarter of an hour at most on two cores
#   make test-all  every test: an hour at most
#   make test-cache-long  a million random operations on the prefix cache
#   make prove-fit compile Kimi K3 for TPU slices that are not here: half an hour
#   make lint      style only
#   make clean     remove what was installed and built

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
# A file's tests share compiled functions, so a file stays on one worker.
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n $(JOBS) --dist loadfile

.PHONY: demo test test-all test-cache-long prove-fit lint clean

demo: $(VENV)/installed
	JAX_PLATFORMS=cpu $(BIN)/python -m k3jax.generate </dev/null
	JAX_PLATFORMS=cpu $(BIN)/python -m serving.demo

test: lint
	$(PYTEST) -m "not slow"

test-all: lint
	$(PYTEST)

test-cache-long: $(VENV)/installed-dev
	K3JAX_CACHE_OPERATIONS=1000000 $(BIN)/python -m pytest tests/serving/test_prefix_cache_machine.py

prove-fit: $(VENV)/installed-dev
	$(BIN)/python benchmarks/prove_fit.py

lint: $(VENV)/installed-dev
	$(BIN)/python -m ruff check .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp per set of packages, renewed when pyproject.toml changes.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml | $(BIN)/python
	$(PIP) install -e ".[serve]"
	touch $@

$(VENV)/installed-dev: pyproject.toml | $(BIN)/python
	$(PIP) install -e ".[dev]"
	touch $@ $(VENV)/installed
