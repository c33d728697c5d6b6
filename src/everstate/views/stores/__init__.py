"""Where views' tables live; one folder a store."""
