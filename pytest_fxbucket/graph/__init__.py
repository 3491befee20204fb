"""Reads graphs and changes none: collectives, contents, layout, schedule, text."""
