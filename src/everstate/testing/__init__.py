"""Public helpers for tests: contract suites and checkers with an oracle of their own."""
