# The menu of everstate. Needs only Python 3.11+ with its venv module, make and sh.
.DEFAULT_GOAL := help
.PHONY: help env demo test lint bench docs lock clean FORCE

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/everstate.stamp
WANTED = cat requirements-dev.lock pyproject.toml | cksum

help:  ## show this menu
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env:  ## make .venv from the lock (quick when nothing changed)
	@test "$$($(WANTED))" = "$$(cat $(STAMP) 2>/dev/null)" || $(MAKE) --no-print-directory $(STAMP)

$(STAMP): FORCE
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make env PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements-dev.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@$(WANTED) > $(STAMP)

FORCE:

demo: env  ## a month of real flights through log, lake and proven views
	$(BIN)/everstate demo $(ARGS)

# A file stays with one worker, and files come in the order of their names: the long ones are in
# acceptance and faults, the short ones in unit, so that the workers end together.
test: lint  ## lint, types, layers, and every test
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 40 $(ARGS)

lint: env  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: env  ## measure each figure beside its floor; writes bench/results.json
	$(BIN)/python -m bench $(ARGS)

docs: env  ## write the pages that the code holds (docs/reference), and check all pages
	$(BIN)/python docs/generate.py
	$(BIN)/pytest -q tests/unit/test_docs_reference.py

lock: env  ## resolve the dependencies again into the two lock files
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes pyproject.toml -o requirements.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes pyproject.toml --group dev -o requirements-dev.lock

clean:  ## remove .venv and the caches of the tools (not .everstate)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache dist
