# make demo    build, validate, publish and use the pocket family, from nothing (see README)
# make test    the tests, under 15 minutes on two cores
# make test-full  the long suites (an hour)
# make check   ruff and mypy
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: install demo test test-full check clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[build,dev]'
	touch $@

install: $(VENV)/installed

demo: install
	$(BIN)/python -m pipeline.demo

test: install
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m "not full"

test-full: install
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .trimtab demo build .mypy_cache .ruff_cache
