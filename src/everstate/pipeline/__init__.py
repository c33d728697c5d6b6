"""The pipeline: the Spark session, the archive, and the views kept from changes."""
