"""Some of the zoo, as ``make zoo`` runs it whole; and that the zoo sees what it is for."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from pytest_fxbucket.ranks.pools import Pools
from suites.zoo.drifting import SHELF
from suites.zoo.installed import installed
from suites.zoo.shelf import ZooModel
from suites.zoo.table import MOST_ULPS, wrong
from suites.zoo.visit import ROOT, Outcome, visit

MODEL = SHELF.drifting


@installed
def test_models_of_other_peoples_libraries_have_the_outcome_that_they_had() -> None:
    """In a process of its own: torchvision is on the path there, which nothing else here has."""
    command = [sys.executable, "-m", "suites.zoo.run", "--some"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "5 models passed, 0 failed" in ran.stdout


def test_gradients_that_are_not_eagers_are_seen_though_all_items_would_be_green(pools: Pools, tmp_path: Path) -> None:
    outcome = visit(MODEL, "fp32", pools, tmp_path, items=())
    assert outcome.kind == "parted"
    assert outcome.nearness > MOST_ULPS
    assert "0.norm.weight" in outcome.said


def judged(model: ZooModel, *found: tuple[str, str, float]) -> list[str]:
    return list(wrong(model, [Outcome(model.name, model.library, "fp32", kind, said, apart) for kind, said, apart in found]))


def test_another_outcome_than_a_model_must_have_fails_the_zoo() -> None:
    refused = ZooModel("drifting", "odd", MODEL.build, MODEL.draw, refused={"fp32": "module a"})
    assert judged(MODEL, ("green", "", 0.0), ("green", "the traced way", 3.0)) == []
    assert judged(replace(MODEL, near=True), ("near", "within 2 ULPs", 2.0)) == []
    assert judged(refused, ("refused", "module a gives no value", 0.0)) == []
    for model, found, said in (
        (MODEL, ("refused", "module a gives no value", 0.0), "refused, where it must be green"),
        (MODEL, ("parted", "2 of 4", 1.0), "parted, where it must be green"),
        (MODEL, ("near", "within 2 ULPs", 2.0), "near, where it must be green"),
        (MODEL, ("green", "the traced way", 99.0), "99.0 ULPs"),
        (refused, ("green", "", 0.0), "green, where it must be refused"),
        (refused, ("refused", "module b gives no value", 0.0), "does not say module a"),
    ):
        (line,) = judged(model, found)
        assert said in line
