"""What needs attention in a project: one list, for the console, `everstate status` and alerts."""
