"""Views in PostgreSQL: tables, and transactions that write rows and position together."""
