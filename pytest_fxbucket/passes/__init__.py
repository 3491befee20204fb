"""Changes graphs and knows nothing of pytest: merging, reordering, and the passes of others."""

from __future__ import annotations

from pytest_fxbucket.passes.dropin import manual_overlap_bucketing

__all__ = ["manual_overlap_bucketing"]
