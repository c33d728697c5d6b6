"""What commands ask of a running pipeline, and past states computed in batch."""
