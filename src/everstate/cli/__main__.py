"""`python -m everstate.cli`: how the supervisor starts its roles."""

from everstate.cli import main

main()
