# What one can do with a checkout. `make` alone lists it. Set-up is done by tools/setup.sh, once: a second call is quick.
.DEFAULT_GOAL := help
.PHONY: help demo setup test check docs format lint types contracts bench bench-serve freeze clean
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
CODE := src tests bench tools
# Whole files go to a worker each, for the tests of a file share what they set up; in their order, the long ones first.
WORKERS := auto
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

help: ## list what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null \
	  || grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST)

demo: ## install, run the flights job to an answered request, then play its year (ARGS=--no-year: without)
	@tools/setup.sh all
	@$(BIN)/onejob demo flights $(ARGS)
	@echo; echo "For these commands in this shell, first:  source .venv/bin/activate"

setup: ## install everything for development into .venv, and what the tests need from apt
	@tools/setup.sh dev

test: setup ## set up everything and run all tests
	@$(PYTEST)

check: setup format-check lint types contracts ## all checks, then all tests
	@$(PYTEST)

docs: setup ## only the tests that keep the documentation true
	@$(BIN)/python -m pytest tests/docs

format: setup ## format the code
	@$(BIN)/ruff format $(wildcard $(CODE))
	@$(BIN)/ruff check --fix-only --quiet $(wildcard $(CODE))

.PHONY: format-check
format-check: setup
	@$(BIN)/ruff format --check $(wildcard $(CODE))

lint: setup ## look for mistakes with ruff
	@$(BIN)/ruff check $(wildcard $(CODE))

types: setup ## check all types with mypy --strict
	@$(BIN)/mypy -p onejob

contracts: setup ## check who imports whom
	@$(BIN)/lint-imports

bench: setup ## measure what is quick to measure: an unchanged run, what a step costs, the ledger (docs/figures.md)
	@$(BIN)/python bench/rerun.py
	@echo; $(BIN)/python bench/overhead.py
	@echo; $(BIN)/python bench/ledger.py --steps 1000

bench-serve: setup ## serving beside Triton, MLServer, LitServe, BentoML and FastAPI; installs them elsewhere (ARGS=...)
	@$(BIN)/python bench/serving.py $(ARGS)

freeze: setup ## write constraints.txt from what is installed in .venv
	@$(BIN)/python tools/freeze.py

clean: ## remove .venv and all caches; runs and models in ~/.onejob stay
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache src/*.egg-info
	find src tests bench tools -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
