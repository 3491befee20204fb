"""Every model of the zoo: its items, its gradients beside eager's, and the table of docs/zoo.md; ``make zoo``.

``python -m suites.zoo.run``: everything; ``--some``: CI's; ``--only timm.vit,odd.tied``: some; ``--write``: the table anew.
Ends with 1 if a model has another outcome than the one it must have.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from pytest_fxbucket.ranks.pools import Pools
from suites.zoo.libraries import provide

provide()

from suites.zoo.shelf import ZooModel  # noqa: E402 - the libraries are on the path first
from suites.zoo.table import missing_lines, table_lines, wrong  # noqa: E402
from suites.zoo.visit import ITEMS, ROOT, ROWS, Outcome, visit  # noqa: E402

SHELVES = (
    "odd_parameters",
    "odd_forwards",
    "odd_backwards",
    "odd_layers",
    "hf_causal",
    "hf_encoders",
    "titan",
    "vision",
    "timm_models",
    "diffusion",
    "tuned",
)
SOME = ("transformers.mixtral", "transformers.bert", "torchvision.vit", "timm.vit", "diffusers.dit", "peft.lora")
"""What CI runs, in bfloat16; test_odd has all odd ones in float32, test_titan_init and test_titan_trainer Llama."""
TABLE = ROOT / "docs" / "zoo.md"


def main() -> int:
    """Visit what is asked for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--some", action="store_true", help="what CI runs")
    parser.add_argument("--only", default="", metavar="LIBRARY.MODEL,...", help="some models")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)} anew")
    given = parser.parse_args()
    wanted = SOME if given.some else tuple(filter(None, given.only.split(",")))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # the models are small, and ranks do as this process
    torch.set_num_threads(1)
    models = everything()
    chosen = [model for model in models if not wanted or f"{model.library}.{model.name}" in wanted]
    outcomes = visits(chosen, ("bf16",) if given.some else ROWS)
    lines = list(table_lines(models, outcomes))
    if given.write:
        TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    problems = [line for model in models for line in wrong(model, outcomes)] + missing_lines(models, wanted, outcomes)
    print("\n".join(["", *lines, "", *(f"NOT AS IT MUST BE: {line}" for line in problems)]), flush=True)
    failed = len({line.partition("[")[0].partition(":")[0] for line in problems})
    visited = len({(one.library, one.model) for one in outcomes})
    print(f"zoo: {visited - failed} models passed, {failed} failed", flush=True)
    return min(1, len(problems))


def everything() -> list[ZooModel]:
    """All models, library by library."""
    return [model for name in SHELVES for model in import_module(f"suites.zoo.{name}").SHELF]


def visits(models: Sequence[ZooModel], rows: Sequence[str]) -> list[Outcome]:
    """``rows`` of each of ``models``, said as they come."""
    pools, outcomes, begin = Pools(), [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            for row in rows:
                one = visit(model, row, pools, Path(folder), ITEMS)
                outcomes.append(one)
                name = f"{one.library}.{one.model}[{row}]"
                print(f"{time.monotonic() - begin:7.1f} s  {name:38} {one.kind:8} {one.said}", flush=True)
    pools.close()
    return outcomes


if __name__ == "__main__":
    raise SystemExit(main())
