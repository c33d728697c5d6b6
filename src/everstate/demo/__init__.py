"""The demonstration: the flights of 2013 through a real log, a real lake and proven views."""
