"""The captured step as data: graphs, the role of each input and output, the mesh; what every other room speaks of."""

from __future__ import annotations
