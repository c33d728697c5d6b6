"""Views with ORDER BY whose outputs have the names of columns that everstate uses itself."""

from __future__ import annotations

from kind_cases import Case

ORDERED = (
    Case(
        "groups_under_names_of_columns",
        "SELECT region, sum(quantity) AS n, count(*) AS c FROM sale GROUP BY region "
        "ORDER BY c DESC, n LIMIT 2",
        oracle="SELECT region, sum(quantity) AS q, count(*) AS c FROM sale GROUP BY region "
        "ORDER BY c DESC, q NULLS FIRST, region NULLS FIRST LIMIT 2",
        ordered=True,
    ),
    Case(
        "values_under_names_of_columns",
        "SELECT shop AS m0, count(*) AS g0, max(quantity) AS most FROM sale GROUP BY shop "
        "ORDER BY most DESC LIMIT 2",
        oracle="SELECT shop, count(*) AS c, max(quantity) AS most FROM sale GROUP BY shop "
        "ORDER BY most DESC NULLS LAST, shop DESC LIMIT 2",
        ordered=True,
    ),
    Case(
        "rows_under_names_of_columns",
        "SELECT quantity AS c1, price AS c0, shop AS key FROM sale ORDER BY price, day LIMIT 4",
        oracle="SELECT quantity, price, shop FROM sale "
        "ORDER BY price NULLS FIRST, day NULLS FIRST, sale_id LIMIT 4",
        ordered=True,
    ),
    Case(
        "by_constants",
        "SELECT shop, 2 AS two, 'x' AS x, count(*) AS n FROM sale GROUP BY shop "
        "ORDER BY two, x, n DESC LIMIT 2",
        oracle="SELECT shop, 2 AS two, 'x' AS x, count(*) AS n FROM sale GROUP BY shop "
        "ORDER BY n DESC, shop DESC LIMIT 2",
        ordered=True,
    ),
)
