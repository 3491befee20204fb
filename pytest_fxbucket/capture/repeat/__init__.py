"""Layers that are alike, traced once and repeated."""
