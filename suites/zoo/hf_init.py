"""``fxbucket init --hf`` on configurations of many architectures, and the items of each plan that it writes: a table.

``python -m suites.zoo.hf_init``: all, in an hour or more; ``--only llama,t5``: some; ``--shallow``: with a layer of each
kind, in ten minutes; ``--write``: docs/hugging-face-table.md anew. Sizes are published ones, or the defaults of transformers,
which are those of some published model. Ends with 1 if one has another outcome than it must have.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from pytest_fxbucket.cli.__main__ import main as fxbucket
from pytest_fxbucket.cli.hugging_face.small import merged, small_sizes
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.plan import load_plans
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun, item_names
from pytest_fxbucket.settings import RunSettings
from suites.zoo.hf_configs import CONFIGS, Configured
from suites.zoo.visit import ROOT

PAGE = ROOT / "docs" / "hugging-face-table.md"
HEAD = """# Architectures that `fxbucket init --hf` was tried on

Of each a configuration of published widths went in, with two layers, or one of each kind. Out came a plan whose items ran:
those of the real size on eight ranks that are not there, `bitwise` and `eager` of the small one on two that are. *Told*: init
says what is in the way. `python -m suites.zoo.hf_init --shallow --write` writes this table.
At full depth Llama 3 8B (32 layers) and DeepSeek-V3 (61) have the same outcome.
"""


@dataclass(frozen=True)
class Outcome:
    """What became of one configuration."""

    name: str
    kind: str
    """works; told: init says what is in the way; red: an item of what it wrote is; raw: no sentence of ours."""
    said: str
    parameters: str = ""
    small: str = ""
    needed: str = ""
    """What init did besides, such as overrides."""
    seconds: float = 0.0


def main() -> int:
    """Try what is asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME,...", help="some configurations")
    parser.add_argument("--shallow", action="store_true", help="of the real size a layer of each kind, two at least")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)} anew")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    wanted = given.only.split(",") if given.only else list(CONFIGS)
    outcomes, pools = [], Pools()
    for name in wanted:
        outcome = visit(name, CONFIGS[name], pools, shallow=given.shallow)
        outcomes.append(outcome)
        print(f"{outcome.seconds:6.0f} s  {name:14} {outcome.kind:6} {outcome.said} {outcome.needed}", flush=True)
    pools.close()
    lines = [*HEAD.splitlines(), "", *table(outcomes)]
    if given.write:
        PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(["", *lines]))
    wrong = [one for one in outcomes if (one.kind, True) != _expected(CONFIGS[one.name], one)]
    print("\n".join(f"NOT AS IT MUST BE: {one.name}: {one.kind}: {one.said}" for one in wrong), file=sys.stderr)
    return min(1, len(wrong))


def _expected(configured: Configured, found: Outcome) -> tuple[str, bool]:
    """The kind that there must be, and whether the sentence is that."""
    if configured.told is None:
        return "works", True
    return "told", re.search(configured.told, found.said) is not None


def visit(name: str, configured: Configured, pools: Pools, *, shallow: bool = False) -> Outcome:
    """Init and items of one configuration, in a folder of its own."""
    begin, out, values = time.monotonic(), StringIO(), configured.values()
    if shallow:
        values = merged(values, list(small_sizes(values))[-2])
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("config.json").write_text(json.dumps(values), encoding="utf-8")
        with redirect_stdout(out), redirect_stderr(out):
            status = fxbucket(["init", "--hf", "config.json", "--out", f"hf_{name}.toml"])
        said = out.getvalue()
        kind, sentence = ("works", "") if status == 0 else ("told", _told(said))
        if status == 0:
            kind, sentence = items(Path(folder, f"hf_{name}.toml"), pools)
    tree = re.search(r"^\w+ +([\d,]+) ", said, re.MULTILINE)
    return Outcome(name, kind, sentence, tree[1] if tree else "", "", " ".join(_needed(said)), time.monotonic() - begin)


def _told(said: str) -> str:
    found = re.search(r"It does not pass yet, (.*)|^fxbucket: (.*)", said, re.MULTILINE)
    return (found[1] or found[2]) if found else said[-300:]


def _needed(said: str) -> Iterator[str]:
    for start in (
        "Gradients that may be zero",
        "Not traced",
        "Attention is",
        "The model makes no loss",
        "eager goes the graph's way",
    ):
        yield from (line for line in said.splitlines() if line.startswith(start))


def items(path: Path, pools: Pools) -> tuple[str, str]:
    """Works, and the items of the plan; or red, and the first that is."""
    green, names = list[str](), list[str]()
    for plan in load_plans(path):
        folder = path.parent
        run = PlanRun(
            plan, RunSettings(folder, folder / "golden", folder / ".fxbucket", accept="all"), pools, accept_golden=_write
        )
        for item in item_names(plan):
            try:
                verdict = run.check(re.split(r"[@\[]", item)[0])
            except FxbucketError as error:
                return "red", f"{item}: {error}"
            names.append(item)
            if verdict.outcome == "failed":
                return "red", f"{item}: {verdict.summary}: {' | '.join(verdict.lines[:4])}"
            green.append(item if verdict.outcome == "passed" else f"({item} skipped: {verdict.summary})")
    return "works", ", ".join(green)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """A row for each outcome."""
    works = sum(one.kind == "works" for one in outcomes)
    yield f"{works} of {len(outcomes)} work; of the others init says what is in the way."
    yield from (
        "",
        "| model | parameters | outcome | items, or what is said | what init did besides |",
        "|---|---|---|---|---|",
    )
    for one in outcomes:
        cells = (CONFIGS[one.name].model, one.parameters, one.kind, one.said, one.needed)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ')[:1200] for cell in cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
