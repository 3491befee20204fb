"""Reviewed texts: where they lie, how they are read, and how a new one is accepted."""
