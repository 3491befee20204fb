"""Ways to break a graph: each function is an operator of its name; its first line says what it does, the next where it can."""
