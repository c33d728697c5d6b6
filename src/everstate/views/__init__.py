"""The views: definitions, SQL to plan, control tables, and the stores that keep them."""
