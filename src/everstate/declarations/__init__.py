"""What a project declares of its ways in, without doing any of it. No I/O."""
