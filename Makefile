# make book: build the site; make test: check everything. Both create .venv on their first call, and work offline after.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SITE := _build/html
export PYTHON
# One thread a process: the tests run in two processes, and their numbers do not depend on the machine.
export OMP_NUM_THREADS := 1

.PHONY: help book test site lint format notebooks cards bench clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "make %-10s %s\n", $$1, $$2 }'

# The environment depends on what is asked for, so an unchanged list of requirements installs nothing.
$(STAMP): requirements.txt requirements-teaching.txt pyproject.toml tools/install.sh
	@bash tools/install.sh $(VENV)

book: $(STAMP) site ## build the book and print where it is
	@echo "The book is at file://$(CURDIR)/$(SITE)/index.html"

site: $(STAMP)
	@$(BIN)/python tools/build.py

test: $(STAMP) ## run every check: lint, types, units, notebooks, site, links, browser
	@$(BIN)/python tools/check.py

lint: $(STAMP) ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## rewrite the Python files in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(STAMP) ## execute all chapters again, in place
	$(BIN)/python tools/notebooks.py execute
	$(BIN)/python tools/assignments.py refresh

cards: $(STAMP) ## execute all chapters again and measure their run cards
	$(BIN)/python tools/notebooks.py card

bench: $(STAMP) ## compare the engines for private gradients on this machine
	$(BIN)/python -m dpivon bench

clean: ## remove what was built; the environment stays
	rm -rf _build .pytest_cache .mypy_cache .ruff_cache .hypothesis
