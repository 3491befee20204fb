"""A module that cannot be imported, as one of ours on a torch without a private name."""

from __future__ import annotations

raise AttributeError("torch has no such name")
