"""Is it still the same program? Runs the unbucketed and the bucketed step on the same batches and compares them bit for bit."""

from __future__ import annotations
