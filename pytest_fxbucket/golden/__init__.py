"""Reviewed texts: a schedule as text, read back and compared in words; where texts lie, and how a new one is accepted."""
