"""Public helpers for tests: contract suites, and checkers with independent oracles."""
