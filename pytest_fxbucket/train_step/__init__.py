"""A user's own training step, captured and called like the function."""
