"""The page of ``fxbucket mutate`` names every operator, and says of each what its first line says."""

from __future__ import annotations

import re
from pathlib import Path

from pytest_fxbucket.mutate.registry import operators_of

PAGE = Path(__file__).parents[2] / "docs/howto/mutate.md"


def test_every_operator_has_its_row() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    said = {one.name: one.says for one in operators_of(())}
    assert rows == {name: says[0].lower() + says[1:] for name, says in said.items()}
