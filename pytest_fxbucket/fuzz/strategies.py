"""Programs, plans and options as hypothesis draws them; in tests of your own::

@given(trials("mytrainer.passes:bucket"))
def test_my_pass(trial):
    assert problem(trial, "mytrainer.passes:bucket") == ""
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from hypothesis import strategies as st

from pytest_fxbucket.fuzz import collective_steps, compute_steps, training_steps
from pytest_fxbucket.fuzz.drawing import Drawing, DrawingStep
from pytest_fxbucket.fuzz.our_pass import ROUNDS, SAME_BITS
from pytest_fxbucket.fuzz.trial import BYTES, PLANS, WRONG, PlanChoice, Trial
from pytest_fxbucket.fuzz.tried_pass import TriedPass, subject_of
from pytest_fxbucket.fuzz.users_packer import JOINED

# Legal graphs out of plain numbers: any list of steps is a program, so a failing one can be cut short.


_STEPS = {**compute_steps.STEPS, **collective_steps.STEPS, **training_steps.STEPS}


def _often(*names: str) -> tuple[str, ...]:
    return tuple(name for name in names for _ in range(_STEPS[name][1]))


NAMES = _often(*compute_steps.STEPS, *collective_steps.STEPS)
"""Kinds of steps, the simplest first; a kind that is drawn more often stands there several times."""
TRAINING = _often(*compute_steps.STEPS, *training_steps.BESIDE, *training_steps.STEPS)
"""Kinds of steps in a whole training step."""


def drawn(world: int, steps: Sequence[DrawingStep], inside: str = "") -> Drawing:
    """The program of ``steps``, not finished, with at least one launch. ``inside``: the prefix of all modules' names."""
    drawing = Drawing(world, inside)
    for step in steps:
        _STEPS[step.what][0](drawing, step)
    training_steps.complete(drawing)
    if not drawing.modules:
        _STEPS["gather"][0](drawing, DrawingStep("gather"))
    return drawing


# What hypothesis draws.


# What stands in a tuple twice is drawn twice as often.
_MODES = (None, None, "default", "custom_ops", "custom_ops_multidtype")
KEYWORDS: dict[str, tuple[Any, ...]] = {
    "bucket_mode": _MODES,
    "insert_overlap_deps": (False, False, True),
    "collective_bucketing": (True, True, False),
    "pre_bucketing_fsdp_collectives": (True, False),
    "max_in_flight_gb": (5, 5, 1e-6, 1e-7),  # no limit here, 1 kB, 100 bytes
}
"""Values for the keywords that a pass which is not ours may take; None: the keyword is left out."""
OPTIONS: dict[str, tuple[Any, ...]] = {
    "by": ("size",),
    "caps": ((60,), (200, 1000)),
    "dtypes": ("mixed",),
    "enabled": (False,),
    "layout": ("execution",),
    "prefetch": (0, 2),
    "defer_reduce": (False,),
    "gather_group": ("own",),
    "insert_overlap_deps": (True,),
    "updates": ("ready",),
    "packer": (JOINED,),
    "transforms": (SAME_BITS, (ROUNDS,)),
    "launch_at": ((2, 0, 0), (0, 1, 1)),
    "wait_before": ((1, 0, 1),),
    "schedule": ("auto",),
}
"""Options of our pass, with values other than the default, which are tried one at a time."""
INSIDE = ("", "", "", "net.", "L['self'].", "L['model'].")
"""Prefixes of modules' names, as tracers spell the model that they lie in."""

_small = st.integers(0, 11)
_plans = st.integers(0, len(PLANS) - 1)
_deps = st.sampled_from([False, False, False, True])
_own = st.sampled_from(["same", "same", "same", "own"])
_packers = st.sampled_from(["default", "default", "default", JOINED])
_places = st.one_of(st.just(()), st.just(()), st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 1)))
by_hand = st.builds(
    PlanChoice,
    plan=_plans,
    by=st.sampled_from(["plan", "plan", "plan", "size"]),
    caps=st.one_of(st.just((0,)), st.lists(st.sampled_from(BYTES), min_size=1, max_size=3).map(tuple)),
    dtypes=st.sampled_from(["separate", "mixed"]),
    enabled=st.sampled_from([True, True, True, True, False]),
    layout=st.sampled_from(["registration", "execution"]),
    prefetch=st.integers(0, 2),
    defer_reduce=st.booleans(),
    gather_group=_own,
    insert_overlap_deps=_deps,
    updates=st.sampled_from(["last", "last", "ready"]),
    packer=_packers,
    transforms=st.sampled_from([(), (), (), (), SAME_BITS, (ROUNDS,)]),
    launch_at=_places,
    wait_before=_places,
)
"""Our pass, and a schedule by hand."""
crossing = st.builds(
    PlanChoice,
    plan=_plans,
    caps=st.sampled_from([(0,), (0,), (60,), (200,)]),
    dtypes=st.sampled_from(["separate", "mixed"]),
    enabled=st.sampled_from([True, True, True, False]),
    layout=st.sampled_from(["registration", "execution"]),
    prefetch=st.integers(0, 2),
    defer_reduce=st.booleans(),
    gather_group=_own,
    updates=st.sampled_from(["ready", "ready", "last"]),
    packer=_packers,
    moved=st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)]),
)
"""Our pass on a whole training step, by hand, and work that crosses its calls."""
automatic = st.builds(
    PlanChoice,
    plan=_plans,
    by=st.sampled_from(["plan", "overlap", "overlap", "size"]),
    caps=st.sampled_from(BYTES).map(lambda size: (size,)),
    dtypes=st.sampled_from(["separate", "mixed"]),
    enabled=st.sampled_from([True, True, True, False]),
    layout=st.sampled_from(["registration", "execution"]),
    gather_group=_own,
    insert_overlap_deps=_deps,
    schedule=st.just("auto"),
    max_prefetch=st.sampled_from([None, None, 1, 2]),
    in_flight=st.sampled_from([None, None, 1.0, 1.5, 3.0]),
    packer=_packers,
    max_memory_increase=st.sampled_from([None, 0.0, 0.1]),
    max_memory_increase_gb=st.sampled_from([None, None, 0.0, 1e-7]),
    costs=st.integers(0, 99),
)
"""Our pass, and a schedule that it finds by itself."""


def steps(
    names: Collection[str] = NAMES, least: int = 12, most: int = 44, reach: int = 11
) -> st.SearchStrategy[list[DrawingStep]]:
    """Lists of steps of these names, each of which :func:`~pytest_fxbucket.fuzz.strategies.drawn` makes a program of.

    ``reach``: how far back what they read and write may lie; where it is small, they meet more often.
    """
    back = st.integers(0, reach)
    return st.lists(st.builds(DrawingStep, st.sampled_from(list(names)), back, _small, back), min_size=least, max_size=most)


def plans(subject: TriedPass, *, wrong: bool = True) -> st.SearchStrategy[PlanChoice]:
    """Plans and options that ``subject`` takes; with ``wrong`` one in eight is that."""
    if subject.is_ours and not wrong:
        return st.one_of(by_hand, automatic)
    if subject.is_ours:
        bad = st.builds(PlanChoice, plan=_plans, wrong=st.sampled_from([one for one in WRONG if "bucket_mode" not in one]))
        return st.one_of(*[by_hand] * 4, *[automatic] * 3, bad)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        name: st.sampled_from(values) for name, values in KEYWORDS.items() if name in subject.keywords
    }
    if "custom_runtime_estimation" in subject.keywords:
        keywords["costs"] = st.integers(0, 99)
    given = st.fixed_dictionaries(keywords).map(lambda found: {name: one for name, one in found.items() if one is not None})
    right = st.builds(PlanChoice, plan=_plans, keywords=given)
    if not subject.takes_plan or not wrong:
        return right
    names = [one.wrong for one in wrong_plans(subject)]
    return st.one_of(*[right] * 7, st.builds(PlanChoice, plan=_plans, keywords=given, wrong=st.sampled_from(names)))


def wrong_plans(subject: TriedPass) -> list[PlanChoice]:
    """One plan for each way to be wrong that applies to ``subject``."""
    if not subject.takes_plan:
        return []
    takes_mode = not subject.is_ours and "bucket_mode" in subject.keywords
    keywords: dict[str, Any] | None = None if subject.is_ours else {}
    return [PlanChoice(keywords=keywords, wrong=one) for one in WRONG if one != "an unknown bucket_mode" or takes_mode]


def one_at_a_time(subject: TriedPass) -> list[PlanChoice]:
    """Plain options; then, for each other value of each option that ``subject`` takes, plain ones with only that changed."""
    if subject.is_ours:
        return [PlanChoice(), *(PlanChoice(**{name: value}) for name, values in OPTIONS.items() for value in values)]
    values: dict[str, tuple[Any, ...]] = {name: found for name, found in KEYWORDS.items() if name in subject.keywords}
    if "custom_runtime_estimation" in subject.keywords:
        values["costs"] = (0, 1)
    given = [{name: one} for name, found in values.items() for one in dict.fromkeys(found) if one is not None]
    return [PlanChoice(keywords=keywords) for keywords in ({}, *given)]


def trials(pass_name: str, ranks: int = 2) -> st.SearchStrategy[Trial]:
    """Programs on so many ranks, with plans and options that the pass takes: manual, torch or module:callable."""
    subject = subject_of(pass_name)

    def made(found: list[DrawingStep], chosen: PlanChoice, inside: str) -> Trial:
        return chosen.trial(drawn(ranks, found, inside))

    return st.builds(made, steps(), plans(subject), st.sampled_from(INSIDE))
