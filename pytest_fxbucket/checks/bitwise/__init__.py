"""Is it still the same program? The unbucketed and the bucketed step on the same ranks and batches, bit for bit."""

from __future__ import annotations
