"""Does the graph keep what the plan promises? Read from the graph that came out of the pass, without any golden."""

from __future__ import annotations
