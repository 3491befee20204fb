"""The checks of a plan, behind one registry; each reads the graphs that came out of a pass and reports in sentences."""
