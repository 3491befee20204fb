"""``fxbucket init --torchtitan`` on every model of its registry, and the items of each plan that it writes: a table.

``python -m suites.zoo.titan_init``: all; ``--only llama3,qwen3``: some; ``--write``: docs/torchtitan-table.md anew. Ends with 1
if one has another outcome than it must have.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from pytest_fxbucket.cli.__main__ import main as fxbucket
from pytest_fxbucket.ranks.pools import Pools
from suites.zoo.hf_init import items
from suites.zoo.libraries import provide
from suites.zoo.visit import ROOT

PAGE = ROOT / "docs" / "torchtitan-table.md"
HEAD = """# Models that `fxbucket init --torchtitan` was tried on

Models of the registry of torchtitan 0.2.2, on CPU: the plan's items on eight ranks that are not there, `bitwise` and `eager` on
two that are. *Told*: init says what is in the way. `python -m suites.zoo.titan_init --write` writes this table.
"""
MODELS: dict[tuple[str, str], str | None] = {
    ("llama3", "debugmodel"): None,
    ("llama3", "8B"): None,
    ("llama3", "debugmodel_flex_attn"): "flex",
    ("llama3", "debugmodel_varlen_attn"): "varlen",
    ("qwen3", "debugmodel"): None,
    ("llama4", "debugmodel"): None,
    ("deepseek_v3", "debugmodel"): None,
    ("gpt_oss", "debugmodel"): "flex",
    ("flux", "flux-debug"): "takes img",
    ("vlm", "debugmodel"): "takes pixel_values",
}
"""What init must say of a model and a flavor; None: the plan works."""


@dataclass(frozen=True)
class Outcome:
    """What became of one."""

    model: str
    flavor: str
    kind: str
    """works; told: init says what is in the way; red: an item of what it wrote is."""
    said: str
    parameters: str


def main() -> int:
    """Try what is asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="MODEL,...", help="some models")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)} anew")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {"OMP_NUM_THREADS": "1"}
    provide()
    wanted, pools, outcomes, wrong = given.only.split(",") if given.only else (), Pools(), [], []
    for (model, flavor), told in MODELS.items():
        if wanted and model not in wanted:
            continue
        one = visit(model, flavor, pools)
        outcomes.append(one)
        print(f"{model} {flavor}: {one.kind}: {one.said}", flush=True)
        as_expected = one.kind == "works" if told is None else one.kind == "told" and re.search(told, one.said)
        wrong += [] if as_expected else [one]
    pools.close()
    if given.write:
        PAGE.write_text("\n".join([*HEAD.splitlines(), "", *table(outcomes)]) + "\n", encoding="utf-8")
    print("\n".join(f"NOT AS IT MUST BE: {one.model} {one.flavor}: {one.kind}: {one.said}" for one in wrong), file=sys.stderr)
    return min(1, len(wrong))


def visit(model: str, flavor: str, pools: Pools) -> Outcome:
    """Init and items of one model, in a folder of its own."""
    out = StringIO()
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        with redirect_stdout(out), redirect_stderr(out):
            status = fxbucket(
                ["init", "--torchtitan", model, "--flavor", flavor, "--out", f"titan_{model}_{flavor.lower()[:2]}.toml"]
            )
        said = out.getvalue()
        if status == 0:
            kind, sentence = items(next(Path(folder).glob("*.toml")), pools)
        else:
            found = re.search(r"It does not pass yet, (.*)|^fxbucket: (.*)", said, re.MULTILINE)
            kind, sentence = "told", (found[1] or found[2]) if found else said[-300:]
    tree = re.search(r"^\w+ +([\d,]+) ", said, re.MULTILINE)
    return Outcome(model, flavor, kind, sentence, tree[1] if tree else "")


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """A row for each outcome."""
    yield from ("| model | flavor | parameters | outcome | items, or what is said |", "|---|---|---|---|---|")
    for one in outcomes:
        cells = (one.model, one.flavor, one.parameters, one.kind, one.said)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
