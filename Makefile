# The menu of everstate. Needs only Python 3.11+ with its venv module, make and sh.
.DEFAULT_GOAL := help
.PHONY: help env demo test test-full test-unit test-changed budgets lint bench docs lock clean FORCE

PYTHON ?= python3
UV := 0.13.9
BIN := .venv/bin
STAMP := .venv/everstate.stamp
WANTED = cat requirements-dev.lock pyproject.toml | cksum

help:  ## show this menu
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env:  ## make .venv from the lock (quick when nothing changed)
	@test "$$($(WANTED))" = "$$(cat $(STAMP) 2>/dev/null)" || $(MAKE) --no-print-directory $(STAMP)

$(STAMP): FORCE
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make env PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv==$(UV)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements-dev.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	@$(WANTED) > $(STAMP)

FORCE:

demo: env  ## a month of real flights through log, lake and proven views
	$(BIN)/everstate demo $(ARGS)

# Lint runs beside the tests and has the last word. A file stays with one worker; the longest files
# come first (tests/budgets.json). A test that fails gets a second look, alone (tests/second_look.py).
TOGETHER = { $(MAKE) --no-print-directory lint > test-results/lint.log 2>&1; \
  echo $$? > test-results/lint.code; } & $(BIN)/python tests/second_look.py $(1); code=$$?; wait; \
  lint=$$(cat test-results/lint.code); test $$lint = 0 && echo "lint: nothing found" || \
  cat test-results/lint.log; exit $$((code | lint))
SUITE = -n 2 --dist loadfile --no-loadscope-reorder --durations 40 \
  --budgets tests/budgets.json --junitxml test-results/junit.xml

test: env  ## what CI runs: lint, types, layers, and every test
	@mkdir -p test-results; $(BIN)/python tests/warming.py || exit 1; $(call TOGETHER,$(SUITE) $(ARGS))

test-full: env  ## the same with all counts in full (kills, a month of flights, …): once an issue
	@mkdir -p test-results; $(BIN)/python tests/warming.py || exit 1; \
	  export EVERSTATE_FULL=1; $(call TOGETHER,$(SUITE) $(ARGS))

test-unit: env  ## lint, types, layers, and the tests without a JVM and a server: within a minute
	@mkdir -p test-results; $(call TOGETHER,-q tests/unit $(ARGS))

test-changed: env  ## lint, and the test files whose imports reach what changed (SINCE=a commit)
	@mkdir -p test-results; files=$$($(BIN)/python tests/changed.py $(SINCE)) && \
	  test -n "$$files" || { echo "nothing changed" >&2; exit; }; \
	  $(call TOGETHER,-n 2 --dist loadfile $$files $(ARGS))

budgets: env  ## take the processor seconds of the last `make test` as the budgets of the files
	$(BIN)/python tests/budgets.py

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
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes pyproject.toml --extra all -o requirements.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes pyproject.toml --extra all --group dev -o requirements-dev.lock

clean:  ## remove .venv and the caches of the tools (not .everstate)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache test-results .import_linter_cache dist
