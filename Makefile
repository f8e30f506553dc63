# Everything a fresh machine needs: `make demo` and `make test` create .venv and install into it first.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
CHECKED := autoshard tests benchmarks examples models
PIP := $(PY) -m pip --disable-pip-version-check --no-input

# Two planner threads on a small machine fight with the processes of the tests.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install demo lint test test-all docs clean

help:
	@echo "make demo      plan models/gpt.py for two local processes and train it beside one process"
	@echo "make lint      look for errors of style and of types, without running anything"
	@echo "make test      the same, and run the tests (35 to 45 minutes on 2 cores)"
	@echo "make test-all  run the slow tests too"
	@echo "make install   make .venv and install autoshard into it"
	@echo "make docs      build the documentation as a site into site/"
	@echo "make clean     remove .venv and caches"

# torch goes first and pinned by series: a package that asks for torch without a version could bring
# a build with gigabytes of CUDA libraries.
$(INSTALLED): pyproject.toml
	test -x $(PY) || "$(PYTHON)" -m venv $(VENV)
	$(PIP) install 'torch==2.13.*'
	$(PIP) install -e '.[test]'
	$(PY) -m autoshard.search.warm
	touch $@

install: $(INSTALLED)

demo: $(INSTALLED)
	$(PY) examples/demo.py

lint: $(INSTALLED)
	$(PY) -m ruff check --quiet $(CHECKED)
	$(PY) -m mypy

# A file's tests stay in one worker, since they share models and plans; tests/conftest.py puts the longest files first.
PYTEST := $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# pytest goes last: its closing line is what CI reads.
test: lint
	$(PYTEST) -m "not slow"

test-all: lint
	$(PYTEST)

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
