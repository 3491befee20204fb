"""The pytest plugin: hooks, options, items, fixtures, report; the only room that imports pytest."""

from __future__ import annotations
