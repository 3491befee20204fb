"""What belongs to the process and not to a plan: its state, torch's settings, the garbage collector."""

from __future__ import annotations
