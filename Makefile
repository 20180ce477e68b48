# Every target creates the environment it needs; `make setup` only does that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
SEEDS ?= 5
INSTALL = $(BIN)/python -m pip install --quiet --constraint constraints.txt
JOBS ?= auto
# one thread for each process of the tests, which share the cores among them
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --durations 10 --numprocesses $(JOBS) --dist loadscope --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick coverage matrix lint format bench peers frameworks reproduction docs clean

help:  ## list what can be done
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(READY)  ## create .venv with heldin, heldin-lab and everything for development

# pip reads dependency groups from version 25.1 on
$(READY): pyproject.toml lab/pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(INSTALL) --group dev --editable ".[parquet]" --editable ./lab
	@touch $(READY)

$(DEMO): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable ".[demo]"
	@touch $(DEMO)

demo: $(if $(wildcard $(READY)),$(READY),$(DEMO))  ## a minute: one real table, with and without a validation set; a table and a figure
	$(BIN)/python -m heldin demo --out out/demo.png

test: $(READY)  ## lint, types and all tests of both packages (what CI runs); JOBS=0: in one process
	@$(MAKE) --no-print-directory lint
	$(PYTEST)

quick: $(READY)  ## the inner loop: what is quick and breaks first, in less than a minute
	$(PYTEST) --quiet --exitfirst --quick tests

coverage: $(READY)  ## all tests, and how many lines of the library they reach
	$(PYTEST) --cov --cov-report term

matrix: $(READY)  ## the core suite with oldest and newest Python and PyTorch; a table in CONTRIBUTING.md
	$(BIN)/python -m nox --sessions core lowest table

lint: $(READY)  ## ruff, spelling, the direction of imports and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/mypy

format: $(READY)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## what observing costs, as multiples of a plain step
	$(BIN)/python -m heldin_lab bench

peers: $(READY)  ## install the libraries that bench compares with (without their dependencies)
	$(INSTALL) --no-deps backpack-for-pytorch opacus opt_einsum unfoldNd einops

frameworks: $(READY)  ## install the frameworks that the adapters are tested with
	$(INSTALL) --group frameworks --editable ".[accelerate,ignite,keras,lightning,skorch,transformers]"
	$(INSTALL) --no-deps fastai

reproduction: $(READY)  ## run the paper's experiments (heldin-lab data fetch first) and write their pages
	$(BIN)/python -m heldin_lab reproduce all --seeds $(SEEDS) --resume --out out/reproduction/quick --docs docs/reproduction-quick.md
	$(BIN)/python -m heldin_lab reproduce all --readings --out out/reproduction --docs docs/reproduction.md

docs: $(READY)  ## build the documentation into site/ (open site/index.html)
	$(BIN)/python docs/build.py
	@echo "The documentation is in site/index.html"

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache out site
