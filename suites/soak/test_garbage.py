"""The soak's judges of garbage see what they are there for: garbage that is taken, tracebacks, and what never ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.checks.verdict import passed
from pytest_fxbucket.golden.store import GoldenStore
from suites.soak import garbage as part
from suites.soak.garbage import garbage

SEED = 1


def faults(kind: str, count: int = 20, judge: part.Judge | None = None) -> tuple[list[str], list[str]]:
    """What is told of mutants of one kind, and the lines that are printed."""
    lines: list[str] = []
    return list(garbage(count, SEED, lines.append, {kind: judge or part.KINDS[kind]})), lines


def loads_all(path: Path) -> list[Any]:
    return []


def answers(text: str, status: int) -> Any:
    def main(words: list[str]) -> int:
        print(text)
        return status

    return main


@pytest.mark.parametrize(
    ("kind", "name", "value", "says"),
    [
        ("plans", "load_rows", loads_all, "a plan that is wrong is loaded"),
        ("stored runs", "verdict_of", lambda *_: passed("benchmark", "x"), "a run that is none is compared with: x"),
        ("command lines", "main", answers("well", 0), "ended well"),
        ("command lines", "main", answers("Traceback (most recent call last)", 1), "printed a traceback"),
    ],
    ids=["plan", "run", "status", "traceback"],
)
def test_garbage_that_is_taken_is_told(monkeypatch: pytest.MonkeyPatch, kind: str, name: str, value: Any, says: str) -> None:
    monkeypatch.setattr(part, name, value)
    monkeypatch.setattr(part, "COMMANDS", [words for words in part.COMMANDS if words[0] != "pytest"])
    told, lines = faults(kind)
    assert any(says in one and f"seed {SEED}" in one for one in told), told
    assert "20 of 20" not in lines[0]


def test_a_golden_that_is_read_without_a_look_at_its_digest_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GoldenStore, "read", lambda self, path: path.read_bytes())
    assert any("taken for one that was accepted" in one for one in faults("goldens")[0])


def test_an_error_that_nobody_foresaw_and_one_of_two_lines_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(path: Path) -> Iterator[None]:
        raise KeyError("lost")

    monkeypatch.setattr(part, "load_rows", breaks)
    assert any("KeyError: 'lost'" in one for one in faults("plans")[0])
    with pytest.raises(part.Fault, match="no one sentence"):
        part._one_sentence(ValueError("two\nlines"))


def test_what_never_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(chance: object, folder: Path) -> str:
        while True:
            pass

    monkeypatch.setattr(part, "LIMIT_S", 0.05)
    told, lines = faults("plans", 2, waits)
    assert ["not done in 0.05 s" in one for one in told] == [True, True]
    assert lines == ["garbage: 0 of 2 plans as they should be (); seed 1"]


def test_a_seed_repeats_its_mutants() -> None:
    assert faults("goldens")[1] == faults("goldens")[1]


def test_mutants_that_are_all_well_show_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told, _ = faults("plans", 20, lambda chance, folder: "equal")
    assert told == ["garbage: 0 of 20 plans were refused, so that they show little"]
