"""The schedule of a step: as data, as text that a person reviews, read back, and what changed in words."""
