"""The demonstration: the flights of 2013 through a real log, a real lake and proven views."""

from datetime import date

FEBRUARY = (date(2013, 2, 1), date(2013, 2, 28))
"""First and last day of the short demonstration: 24,951 flights, 73,592 changes."""

YEAR = (date(2013, 1, 1), date(2013, 12, 31))
"""First and last day of all the data: 336,776 flights, 1,002,073 changes."""
