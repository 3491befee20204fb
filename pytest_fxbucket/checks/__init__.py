"""The checks of a plan behind one registry; each reads what came out of a pass and says what is wrong, in sentences."""
