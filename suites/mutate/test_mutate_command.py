"""``fxbucket mutate`` and the check mutation, as a user has them: in a folder of one's own, on a plan of one's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.cli.__main__ import main
from pytest_fxbucket.mutate.registry import operators_of
from pytest_fxbucket.ranks.pools import Pools
from suites.plans.llama import LLAMA

OWN = "suites.mutate.own_operators"
TEXT = f"""{LLAMA}
[checks]
golden = false
eager = false
"""
ONLY_COLLECTIVES = TEXT + "audit = false\nsame = false\nbitwise = false\n"
Capsys = pytest.CaptureFixture[str]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def mutate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys, pools: Pools) -> Run:
    """Run the command on a plan of this text, one process on ranks that are warm: its status, and what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pytest_fxbucket.cli.mutation_workers.Pools", lambda: pools)
    monkeypatch.setattr(pools, "close", lambda: None)

    def run(*words: str, text: str = TEXT) -> tuple[int, str]:
        (tmp_path / "plan.toml").write_text(text)
        status = main(["mutate", "plan.toml", *words])
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return status, said.out if status in (0, 1, 130) and said.out else said.err

    return run


@pytest.fixture
def refused(mutate: Run) -> Callable[..., str]:
    """What is said of a command that cannot be done, but for progress."""

    def run(*words: str, status: int = 1, text: str = TEXT) -> str:
        found, said = mutate(*words, text=text)
        assert found == status
        return said.splitlines()[-1]

    return run


def operators(*names: str) -> tuple[str, str]:
    return "--operators", ",".join(f"{OWN}:{name}" for name in names)


def test_what_is_found_is_counted_by_operator_and_by_check_however_many_workers_make_it(mutate: Run) -> None:
    own = ",".join(f"{OWN}:{name}" for name in ("doubled_loss", "traded_sides", "cannot"))
    words = ("--operators", f"wait_dropped,{own}", "--at-most", "5")
    status, said = mutate(*words)
    assert status == 0
    assert said.startswith(
        "operator       found  survived  equivalent  undecided\n"
        "doubled_loss       1         0           0          0\n"
        "traded_sides       0         0           1          0\n"
        "wait_dropped       2         0           0          0\n"
    )
    assert "collectives 2" in said
    assert "bitwise 1" in said
    assert "not made: cannot " in said
    assert "plan.toml: found 3 of 3 mutants (100.0 %); audit, collectives and bitwise alone find 3 of 3; 1 equivalent " in said

    status, said = mutate(*words, "--json", "-n", "2")
    found: dict[str, Any] = json.loads(said)
    assert (status, found["score"], found["found"], found["judged"], found["ended"]) == (0, 1.0, 3, 5, "done")
    names = ["wait_dropped", "doubled_loss", "traded_sides", "cannot"]
    assert [one["operator"] for one in found["mutants"]] == [*names, "wait_dropped"]
    first = {one["operator"]: one for one in found["mutants"][:4]}
    assert [first[name]["fate"] for name in names] == ["found", "found", "equivalent", "unmade"]
    assert [first[name]["values_equal"] for name in names[1:]] == [False, True, None]
    assert first["traded_sides"]["why"] == "same values, same schedule"
    assert first["cannot"]["why"].endswith("cannot be made: ValueError: not here")


def test_where_no_mutant_shows_what_the_checks_find_is_no_success(mutate: Run) -> None:
    status, said = mutate(*operators("traded_sides"), text=ONLY_COLLECTIVES)
    assert status == 1
    assert "found 0 of 0 mutants" in said


def test_a_survivor_is_shown_with_its_graph_and_why(mutate: Run) -> None:
    status, said = mutate(*operators("doubled_loss"), text=ONLY_COLLECTIVES)
    assert status == 1
    assert "doubled_loss at " in said
    assert " survives: " in said
    assert "is doubled; its values differ on ranks, and no check that the plan has on compares them" in said
    assert re.search(r"\n    \+%mul\w* = aten.mul.Tensor\(\w+, 2.0\)\n", said)
    assert "found 0 of 1 mutant (0.0 %)" in said


def test_ctrl_c_gives_what_was_found_so_far(mutate: Run) -> None:
    status, said = mutate(*operators("breaks_off"), "--seed", "1", text=ONLY_COLLECTIVES)
    assert status == 130
    assert "stopped" in said


def test_an_operator_that_is_named_twice_is_run_once() -> None:
    assert [one.name for one in operators_of(["wait_dropped", "wait_dropped"])] == ["wait_dropped"]


def test_what_cannot_be_done_is_one_sentence(refused: Callable[..., str]) -> None:
    assert refused("--operators", "wait_droped", status=2).startswith(
        'fxbucket: --operators: there is no operator "wait_droped"; did you mean "wait_dropped"?; known are '
    )
    assert refused("--at-most", "0", status=2) == "fxbucket: --at-most 0: expected a whole number of at least 1"
    for seconds in ("-5", "0", "nan"):
        assert refused("--seconds", seconds, status=2) == f"fxbucket: --seconds {seconds}: expected a number above 0"
    assert refused(*operators("nowhere"), text=ONLY_COLLECTIVES) == "fxbucket: nothing can be broken"
    said = refused(*operators("raises"), text=ONLY_COLLECTIVES)
    assert re.fullmatch(r"fxbucket: the operator raises raised ValueError: mine at own_operators.py:\d+ in raises", said)
    assert (
        refused(*operators("no_site"), text=ONLY_COLLECTIVES)
        == "fxbucket: the operator no_site gives a value of type str, expected a Site"
    )
    red = TEXT + "memory = { peak_max_gb = 0.000001 }\n[cluster]\npreset = 'h100-sxm'\n"
    said = refused(text=red)
    assert said.startswith("fxbucket: plan.toml: memory fails on the graph as it is: ")
    assert said.endswith("; a plan's score says something where its checks pass")
