"""Views in PostgreSQL: tables, and the apply half that moves rows and position together."""
