"""From writes in place to edges: functional twins of operators."""
