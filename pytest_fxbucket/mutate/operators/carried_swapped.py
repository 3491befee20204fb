"""Two values of equal shape that an iteration hands to the next change places."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_fxbucket.mutate.operator import Form, SeenGraph, Site
from pytest_fxbucket.mutate.values import swapped

FORM: Form = "final"


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Each that is handed on, and each that came, with the next one like it."""
    yield from swapped(seen, "carried")
