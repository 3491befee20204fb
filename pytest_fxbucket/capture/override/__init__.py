"""Modules that are not traced: each leaves an anchor in the graph, which becomes a call of the real module or a sub-graph."""
