"""Why layers cannot be traced once and repeated."""

from __future__ import annotations


class NotAlike(Exception):
    """Layers are not repeats of each other, or it cannot be shown; the text is one clause that says which and why."""
