"""Optimizers as part of a step: built from a plan, their state, their update as a graph."""
