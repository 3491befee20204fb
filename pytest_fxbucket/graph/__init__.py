"""Reads graphs and changes none: collectives, following bytes, order, effects, what each launch carries."""
