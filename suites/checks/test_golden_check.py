"""The text of a plan's golden is the same on every rank and for every hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.golden.text import text_of
from pytest_fxbucket.run import PlanRun, RunSettings
from small_llama import PLAN
folder = Path({folder!r})
plan = load_plans(folder / "small.toml")[0]
run = PlanRun(plan, RunSettings(folder, folder / "golden", folder / "artifacts"), None)
world = run._mesh_world
for rank in (0, 3):
    print(text_of(world, rank, "x"), "=====")
"""


def test_the_text_is_the_same_on_every_rank_and_for_every_hash_seed(tmp_path: Path) -> None:
    from small_llama import make_project

    make_project(tmp_path)
    script = SCRIPT.format(path=[str(Path(__file__).parent), str(ROOT)], folder=str(tmp_path))
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
        )
        for seed in ("1", "77")
    ]
    texts = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    first, second, rest = texts[0].split("=====\n")
    assert first == second != ""
    assert rest == ""
    assert texts[0] == texts[1]
