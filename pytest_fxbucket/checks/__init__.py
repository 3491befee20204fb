"""One file a check; each reads what came out of a pass and says what is wrong, in sentences."""
