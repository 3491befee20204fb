"""How good are the checks of a plan? The graph that the pass gives, broken in many ways and places, and who finds it."""
