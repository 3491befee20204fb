"""Work that crosses iterations, on drawn training steps: nothing is found of ours, and what hands on the wrong is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_fxbucket.fuzz import problem, search
from pytest_fxbucket.fuzz.corpus import text_of_test, trial_in
from pytest_fxbucket.fuzz.crossing import CALLS
from pytest_fxbucket.fuzz.drawing import DrawingStep
from pytest_fxbucket.fuzz.finds import VALUES
from pytest_fxbucket.fuzz.judge import judged, made_of
from pytest_fxbucket.fuzz.search import Search
from pytest_fxbucket.fuzz.small_programs import training
from pytest_fxbucket.fuzz.strategies import drawn
from pytest_fxbucket.fuzz.training_steps import UPDATES
from pytest_fxbucket.fuzz.trial import PlanChoice
from pytest_fxbucket.fuzz.tried_pass import subject_of
from pytest_fxbucket.step.portable import digest, encode_module
from pytest_fxbucket.transforms.next_iteration import graphs
from pytest_fxbucket.transforms.next_iteration.graphs import CutGraph
from suites.fuzz.hunt import crossed

OURS = subject_of("manual")


def test_ours_leaves_what_the_steps_leave_one_by_one() -> None:
    """On 4 ranks; ``make soak`` draws 200."""
    assert crossed(4, 8, 4) > 2


def test_small_steps_cross_with_each_kind_of_update() -> None:
    said, met = [], set()
    for update, trial in zip(UPDATES, training(2), strict=True):
        assert judged(trial, OURS) is None
        met.add((update, str(trial.options)))
        try:
            made_of(trial, OURS)
        except Exception as error:
            said.append(str(error))
    assert ["updates a.w0 together" in said[0], "momentum in place" in said[1], "draws random numbers" in said[2]] == [True] * 3
    assert len(said) == 3
    assert len(met) == len(UPDATES), "a kind of update meets one move twice"


# What hands on the wrong thing.


def parameter_of_the_call_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steady gathers parameters as they were before the update that it does first."""
    steady = CutGraph.steady

    def stale(self: CutGraph) -> Any:
        right = self.moved
        self.__dict__["moved"] = [(node, value) for node, value in right if value.role != "param"]
        try:
            return steady(self)
        finally:
            self.__dict__["moved"] = right

    monkeypatch.setattr(CutGraph, "steady", stale)


def rate_of_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed on is the very learning rate, which a scheduler writes in between."""
    carried = graphs.carried_of
    monkeypatch.setattr(graphs, "carried_of", lambda block: [replace(one, copies=False) for one in carried(block)])


def update_of_the_last_call_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clean-up gives parameters as it was given them."""
    cleanup = CutGraph.cleanup

    def idle(self: CutGraph) -> Any:
        graph = cleanup(self)
        given = dict(zip([value.fqn for value in self.own_inputs], graph.find_nodes(op="placeholder"), strict=False))
        returned: Any = graph.output_node().args[0]
        pairs = zip(returned, self.moved, strict=True)
        outputs = [given[value.fqn] if value.role == "param" else node for node, (_, value) in pairs]
        graph.output_node().args = (outputs,)
        return graph

    monkeypatch.setattr(CutGraph, "cleanup", idle)


@pytest.mark.parametrize("breaks", [parameter_of_the_call_before, update_of_the_last_call_left_out])
def test_what_hands_on_the_wrong_thing_is_found(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    found = next(find for trial in training(2) if (find := judged(trial, OURS)) is not None)
    assert found.kind == VALUES


def test_what_is_found_is_cut_short_and_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(search, "sweeps", lambda *_: iter(()))
    monkeypatch.setattr(search, "_SHRINKING_S", 1.0)
    with monkeypatch.context() as broken:
        rate_of_the_next_call(broken)
        trial, find = next(Search(OURS, 2, 0, time.monotonic() + 120).finds())
        assert find.kind == VALUES
        path = tmp_path / "test_fuzz_one.py"
        path.write_text(text_of_test(trial, find, "manual"))
        again, kind = trial_in(path)
        assert digest(encode_module(again.before)) == digest(encode_module(trial.before))
        assert problem(again, "manual", kind).startswith(VALUES)
    assert problem(trial_in(path)[0], "manual") == ""


def test_each_call_has_a_batch_of_its_own_and_is_held_to_what_it_gives() -> None:
    trial = PlanChoice(moved=(0,)).trial(drawn(2, [DrawingStep("parameter"), DrawingStep("update")]))
    names = [node.name for node in trial.before.graph.find_nodes(op="placeholder")]
    assert {f"p8_of_{number + 1}" for number in range(CALLS)} <= set(names)
    assert {"a_w0", "a_w0_momentum"} <= set(names)
    assert len(trial.before.graph.output_node().args[0]) % CALLS == 0
