"""What ``fxbucket fuzz`` is made of: known faults are seen, printed tests hold the program, and everything is drawn."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import fx

from pytest_fxbucket.fuzz import Program, Trial, problem
from pytest_fxbucket.fuzz.corpus import text_of_test, trial_in
from pytest_fxbucket.fuzz.drawing import DrawingStep
from pytest_fxbucket.fuzz.finds import KINDS, PLAN, RAISED, TWICE, VALUES, Find, stripped
from pytest_fxbucket.fuzz.judge import judged, problems
from pytest_fxbucket.fuzz.our_pass import SAME_BITS
from pytest_fxbucket.fuzz.program import aten
from pytest_fxbucket.fuzz.small_programs import FORMS
from pytest_fxbucket.fuzz.smaller import smaller
from pytest_fxbucket.fuzz.strategies import NAMES, by_hand, drawn, plans, steps, trials
from pytest_fxbucket.fuzz.trial import PlanChoice
from pytest_fxbucket.fuzz.tried_pass import subject_of
from pytest_fxbucket.graph.collectives import is_wait, launch_kind
from pytest_fxbucket.graph.effects import written_arguments
from pytest_fxbucket.step.portable import digest, encode_module
from suites.passes.partings import PARTINGS, Parting
from suites.passes.test_beside_torch import VERSION, of_a_version_in_the_table
from suites.soak.known_faults import trial_of

KIND_OF = {
    "raises": RAISED,
    "other values": VALUES,
    "does nothing": PLAN,
    "merges nothing": PLAN,
    "one bucket for both directions": PLAN,
    "takes it for the default": PLAN,
}
EACH = pytest.mark.parametrize("parting", PARTINGS, ids=lambda parting: parting.name.replace("`", ""))
DROPIN = "pytest_fxbucket.passes:manual_overlap_bucketing"


def drawing(count: int) -> settings:
    return settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


@of_a_version_in_the_table
@EACH
def test_each_known_fault_of_torchs_pass_is_seen(parting: Parting) -> None:
    said = problem(trial_of(parting), "torch", PLAN)
    kind = KIND_OF.get(parting.of(VERSION), "")
    assert said.partition(":")[0] == kind


@EACH
def test_nothing_is_seen_where_ours_is_right(parting: Parting) -> None:
    assert problem(trial_of(parting), DROPIN) == ""


def test_a_printed_test_holds_the_program_that_was_drawn(tmp_path: Path) -> None:
    @seed(3)
    @drawing(6)
    @given(trials("manual", 4))
    def look(trial: Trial) -> None:
        path = tmp_path / "test_fuzz_one.py"
        path.write_text(text_of_test(trial, Find(VALUES, 'output 0 "is"\\another'), "manual"))
        again, kind = trial_in(path)
        assert kind == VALUES
        assert digest(encode_module(again.graph_module)) == digest(encode_module(trial.graph_module))
        assert (again.plan, again.options, again.wrong) == (trial.plan, trial.options, trial.wrong)
        assert problem(again, "manual", PLAN) == problem(trial, "manual", PLAN) == ""
        pairs = zip(again.graph_module.graph.nodes, trial.graph_module.graph.nodes, strict=True)
        for one, other in pairs:
            for key in ("nn_module_stack", "fwd_nn_module_stack", "autograd_backward"):
                assert one.op != "call_function" or one.meta.get(key) == other.meta.get(key)

    look()


def test_a_printed_test_gives_inputs_their_dtypes(tmp_path: Path) -> None:
    made = Program(2)
    trial = Trial(made, made.returns(made.neg(made.given("p", 4, dtype=torch.bfloat16))), [["a"]])
    path = tmp_path / "test_fuzz_one.py"
    path.write_text(text_of_test(trial, Find(VALUES, ""), "manual"))
    given, *_ = trial_in(path)[0].graph_module.graph.nodes
    assert given.meta["val"].dtype == torch.bfloat16


SMALL = [
    *(
        DrawingStep("module"),
        DrawingStep("gather"),
        DrawingStep("wait"),
        DrawingStep("compute"),
        DrawingStep("module", 1, 1, 1),
        DrawingStep("gather", 1, 1),
        DrawingStep("wait"),
    ),
    *(DrawingStep("backward"), DrawingStep("reduce"), DrawingStep("reduce", 2, 2), DrawingStep("wait")),
]
"""A program in which every option has something to be about."""


def test_every_step_and_every_option_is_drawn() -> None:
    """A trial is made of one small program, and only of what is drawn that has something which nothing before it had."""
    options, wrong, names, seen = set[str](), set[str](), set[str](), set[str]()

    @seed(1)
    @drawing(300)
    @given(plans(subject_of("manual")))
    def look(chosen: PlanChoice) -> None:
        has = {*chosen.options([["a"]]), *chosen.transforms, chosen.wrong}
        has |= {"in flight"} if chosen.schedule == "auto" and chosen.in_flight is not None else set()
        if has <= seen:
            return
        seen.update(has)
        trial = chosen.trial(drawn(2, SMALL))
        options.update(trial.options)
        wrong.add(trial.wrong)

    @seed(1)
    @drawing(60)
    @given(steps())
    def look_at_steps(found: list[DrawingStep]) -> None:
        names.update(step.what for step in found)

    look()
    look_at_steps()
    assert names == set(NAMES)
    assert len(wrong) == 6
    assert options == {
        *("by", "enabled", "dtypes", "layout", "cap_mb", "prefetch", "defer_reduce", "updates", "gather_group"),
        *("insert_overlap_deps", "launch_at", "wait_before", "transforms", "schedule", "costs", "max_in_flight_gb"),
        *("max_prefetch", "max_memory_increase", "max_memory_increase_gb", "packer"),
    }


def test_trials_have_programs_options_by_hand_and_found_and_wrong_plans() -> None:
    launched, options, wrong = Counter[str](), Counter[str](), Counter[bool]()

    @seed(1)
    @drawing(30)
    @given(trials("manual"))
    def look(trial: Trial) -> None:
        launched.update({kind for node in trial.graph_module.graph.nodes if (kind := launch_kind(node))})
        options.update(list(trial.options))
        wrong[trial.wrong != ""] += 1

    look()
    assert set(launched) >= {"all_gather", "reduce_scatter", "all_reduce"}
    assert set(options) >= {"prefetch", "schedule"}
    assert set(wrong) == {False, True}


def test_a_trial_that_is_cut_short_stays_legal_and_loses_what_it_does_not_need() -> None:
    """As if a pass failed wherever something is reduced."""

    def same(trial: Trial, find: Find) -> Find | None:
        kinds = {launch_kind(node) for node in trial.graph_module.graph.nodes}
        graphs = [trial.graph_module.graph] * trial.program.world
        assert problems(trial.program, graphs) == []
        return find if "reduce_scatter" in kinds else None

    launching = ("gather", "reduce", "all_reduce", "gather_into", "all_reduce_in_place", "write", "view", "compute")

    @seed(2)
    @drawing(5)
    @given(steps(launching, 12, 20), by_hand)
    def look(found: list[DrawingStep], chosen: object) -> None:
        trial = replace(by_hand_trial(found), options={"prefetch": 2})
        assert problem(trial, "manual") == ""
        less, _ = smaller(trial, Find(RAISED, "it raises"), same)
        kinds = [kind for node in less.graph_module.graph.nodes if (kind := launch_kind(node)) is not None]
        assert kinds in (["reduce_scatter"], ["reduce_scatter", "all_reduce"])  # which gives the one output
        assert less.options == {}
        assert judged(less, subject_of("manual")) is None
        nodes = [node for node in less.graph_module.graph.nodes if not written_arguments(node) and not is_wait(node)]
        idle = [node for node in nodes if not node.users]
        assert [node.op for node in idle] == ["output"]
        assert len(idle[0].args[0]) == 1

    def by_hand_trial(found: list[DrawingStep]) -> Trial:
        drawing = drawn(2, [*found, DrawingStep("reduce")])
        return Trial(drawing.program, drawing.finish(), [["a"]])

    look()


@pytest.mark.parametrize("name", FORMS)
def test_equal_launches_of_any_kind_are_drawn_with_merge_duplicates_and_are_well(name: str) -> None:
    """Both are returned: the second as a copy of what the first brought."""
    form, made = FORMS[name], Program(2)
    given = form.given(made, "p")
    shown = made.call(aten.view.default, made.call(aten.view.default, given, [-1]), [4, 3])
    sent = [given, made.neg(made.neg(given))] if form.writes else [given, shown]
    trial = PlanChoice(transforms=SAME_BITS).of(
        made, made.returns(*(form.launched_and_waited(made, one) for one in sent)), ["a"]
    )
    assert trial.options == {"transforms": SAME_BITS}
    assert problem(trial, "manual") == ""


def test_a_plan_may_be_refused_whose_module_a_transformation_left_without_a_launch() -> None:
    found = [DrawingStep("gather", 0, 0, 0), DrawingStep("module", 1, 0, 0), DrawingStep("gather", 1, 0, 0)]
    choice = PlanChoice(transforms=SAME_BITS)
    assert judged(choice.trial(drawn(2, found)), subject_of("manual")) is None
    assert choice.trial(drawn(2, found)).plan == [["a", "b"]]


def test_finds_are_told_apart_by_what_is_said_and_by_what_they_need() -> None:
    assert stripped("KeyError in f_1: no 'layers.3' of 12 in [a, b]") == "KeyError in ...: no ... of ... in ..."
    assert stripped("aten.add_.Tensor (add__tensor) reads x before its wait") == "... reads x before its wait"
    one = Find(RAISED, "it raises on p1", features=frozenset({"a write"}))
    assert Find(RAISED, "it raises on p2", features=frozenset({"a write", "a view"})).is_of([one])
    assert not Find(RAISED, "it raises on p2", features=frozenset({"a view"})).is_of([one])
    assert not Find(RAISED, "it stops on p1", features=one.features).is_of([one])
    assert not Find(TWICE, one.says, features=one.features).is_of([one])
    values = Find(VALUES, "rank 0: output 1 differs in 2 of 3 elements, first at 0: 1 before the pass, 2 after it")
    assert Find(VALUES, "rank 1: input 4 differs in 1 of 1 elements, first at 0: nan before the pass, 2 after it").is_of(
        [values]
    )
    assert not Find(VALUES, "rank 0: output 1 has strides (5, 1) before the pass, (17, 1) after it").is_of([values])
    assert KINDS.index(RAISED) < KINDS.index(VALUES) < KINDS.index(TWICE)


@pytest.mark.parametrize("where", ["everywhere", "alone"])
def test_wrong_values_of_one_rank_are_found_also_if_its_graph_has_other_operators(where: str) -> None:
    made = Program(2)
    trial = Trial(made, made.returns(made.neg(made.gather(made.given("p", 2, 3)))), [["a"]])
    said = problem(trial, f"{__name__}:nothing_on_the_last_rank_{where}")
    assert re.match(r"wrong values: rank 1: output 0 differs in \d+ of 12 elements", said), said


def nothing_on_the_last_rank_everywhere(gm: fx.GraphModule, plans: object) -> fx.GraphModule:
    return scaled(gm, 0 if dist.get_rank() == 1 else 1)


def nothing_on_the_last_rank_alone(gm: fx.GraphModule, plans: object) -> fx.GraphModule:
    return scaled(gm, 0) if dist.get_rank() == 1 else gm


def scaled(gm: fx.GraphModule, factor: int) -> fx.GraphModule:
    for wait in filter(is_wait, list(gm.graph.nodes)):
        with gm.graph.inserting_after(wait):
            made = gm.graph.call_function(aten.mul.Tensor, (wait, factor))
        made.meta = dict(wait.meta)
        wait.replace_all_uses_with(made, lambda user, made=made: user is not made)
    gm.recompile()
    return gm


def test_a_pass_that_never_ends_is_a_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytest_fxbucket.fuzz.judge._LONGEST_S", 0.2)
    drawing_ = drawn(2, [DrawingStep("gather"), DrawingStep("wait")])
    trial = Trial(drawing_.program, drawing_.finish(), ("a",), {}, "")
    found = judged(trial, subject_of(f"{__name__}:turns_in_circles"))
    assert found is not None
    assert (found.kind, found.says) == (RAISED, "TimeoutError in over: it was not done after 0.2 s")


def turns_in_circles(gm: object, plans: object) -> None:
    while True:
        pass


@pytest.fixture
def limit_around() -> Iterator[None]:
    """Of a test, by a signal, as plugins set them."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("limit_around")
def test_a_limit_around_a_trial_goes_on_behind_it() -> None:
    drawing = drawn(2, SMALL)
    trial = Trial(drawing.program, drawing.finish(), [["a"]])
    assert judged(trial, subject_of("manual")) is None
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    assert 0 < left < 1000
