# The menu of everstate. Needs only Python 3.11+ with its venv module, make and sh.
.DEFAULT_GOAL := help
.PHONY: help env demo test test-full test-unit test-changed test-rota test-rota-status lines land budgets lint bench docs docs-site lock clean FORCE

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

# A file stays with one worker; the longest files come first (tests/budgets.json).
SUITE = $(BIN)/python tests/suite.py
WORKERS = -n 4 --dist loadfile --no-loadscope-reorder
REPORTED = --durations 40 --budgets tests/budgets.json --junitxml test-results/junit.xml

test: env  ## what CI runs: lint, types, layers, and the tests that guard every landing
	@exec $(SUITE) --warm $(WORKERS) $(REPORTED) $(ARGS)

test-full: env  ## every test with all counts in full (kills, a month of flights, …): once an issue
	@exec $(SUITE) --warm $(WORKERS) $(REPORTED) --full $(ARGS)

test-unit: env  ## lint, types, layers, and the tests without a JVM and a server: within a minute
	@exec $(SUITE) -q tests/unit $(ARGS)

test-changed: env  ## lint, and the test files whose imports reach what changed (SINCE=a commit)
	@files=$$($(BIN)/python tests/changed.py $(SINCE)) && \
	  test -n "$$files" || { echo "nothing changed" >&2; exit; }; \
	  exec $(SUITE) $(WORKERS) $$files $(ARGS)

MINUTES ?= 60
test-rota: env  ## run the tests of test-full whose last green run is the longest ago (MINUTES=60, ONLY=tests/faults)
	@exec $(BIN)/python tests/rota.py $(MINUTES) $(ONLY)

test-rota-status: env  ## the ten tests of test-full whose last green run is the longest ago
	@exec $(BIN)/python tests/rota.py

lines: env  ## how many lines src and tests have, by room: code and prose apart
	@$(BIN)/python tests/lines.py

land:  ## test a snapshot of the work tree as CI does, and move main to it when green (MESSAGE=…)
	@sh .ci/land

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

docs-site: env  ## the documentation as a site in site/; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lock: env  ## resolve the dependencies again into the two lock files
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes pyproject.toml --extra all -o requirements.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes pyproject.toml --extra all --group dev -o requirements-dev.lock

clean:  ## remove .venv and the caches of the tools (not .everstate)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache test-results .import_linter_cache dist site
