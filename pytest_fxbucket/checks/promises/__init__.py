"""What a plan promises of every graph, and whether it is kept: read from the graph that came out of the pass."""
