"""Ways to break a graph, a file each: its name is the operator's, its first line says what it does, ``sites`` where it can."""
