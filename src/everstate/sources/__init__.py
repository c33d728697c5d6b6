"""Ways in: what writes changes. Each way in ends in the log and knows nobody who reads it."""
