"""What every search begins with: small programs with one thing each that a pass may trip over (ways to launch, and twists of
what stands around launches), and whole training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch

from pytest_fxbucket.fuzz import strategies
from pytest_fxbucket.fuzz.drawing import DrawingStep
from pytest_fxbucket.fuzz.program import Program, aten
from pytest_fxbucket.fuzz.strategies import drawn
from pytest_fxbucket.fuzz.training_steps import UPDATES
from pytest_fxbucket.fuzz.trial import PlanChoice
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.graph.modules import module_stack

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.fuzz.trial import Trial
    from pytest_fxbucket.fuzz.tried_pass import TriedPass

Launching = Callable[[Program, "fx.Node", str], "fx.Node"]
Build = Callable[[Program], "list[fx.Node]"]
OTHER = "again"
"""A second group of all ranks."""


@dataclass(frozen=True)
class LaunchForm:
    """A way to launch one tensor."""

    launch: Launching
    reduces: bool = True
    """Whether its result is a gradient, which nothing computes with unless a twist does."""
    writes: bool = False
    """Whether the launch writes what it sends; then that is a computed value and no input."""

    def given(self, made: Program, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        """An input to launch, which two reductions can be made of, unless ``shape`` is said."""
        node = made.given(name, *(shape or (made.world * made.world, 3)), dtype=dtype)
        return made.neg(node) if self.writes else node

    def launched_and_waited(self, made: Program, node: fx.Node, group: str = "0") -> fx.Node:
        """Launched and waited for."""
        return made.wait(self.launch(made, node, group))

    def read(self, made: Program, wait: fx.Node) -> fx.Node:
        """The output made of ``wait``: a gradient as it is, anything else computed with."""
        return wait if self.reduces else made.neg(wait)


def _gather_into(made: Program, node: fx.Node, group: str) -> fx.Node:
    return made.launch_gather_into(node, made.buffer_for(node, group), group)


FORMS: dict[str, LaunchForm] = {
    "gather": LaunchForm(lambda made, node, group: made.launch_gather(node, group), reduces=False),
    "reduce": LaunchForm(lambda made, node, group: made.launch_reduce(node, "sum", group)),
    "all_reduce": LaunchForm(lambda made, node, group: made.launch_all_reduce(node, "sum", group)),
    "gather_into": LaunchForm(_gather_into, reduces=False),
    "all_reduce_in_place": LaunchForm(
        lambda made, node, group: made.launch_all_reduce_in_place(node, "sum", group), writes=True
    ),
    "all_to_all": LaunchForm(lambda made, node, group: made.launch_all_to_all(node, group)),
    "broadcast": LaunchForm(lambda made, node, group: made.launch_broadcast(node, group)),
}
Twist = Callable[[Program, LaunchForm], "list[fx.Node]"]


# Twists: what stands around two launches of a form. Each gives what its program returns.


def _one_by_one(made: Program, form: LaunchForm) -> list[fx.Node]:
    return [form.read(made, form.launched_and_waited(made, form.given(made, name))) for name in "pq"]


def _together(made: Program, form: LaunchForm) -> list[fx.Node]:
    launches = [form.launch(made, form.given(made, name), "0") for name in "pq"]
    return [form.read(made, made.wait(launch)) for launch in launches]


def _read_early(made: Program, form: LaunchForm) -> list[fx.Node]:
    # The first is read before the second is launched, so one of the two must move to be merged.
    first = made.neg(form.launched_and_waited(made, form.given(made, "p")))
    return [first, form.read(made, form.launched_and_waited(made, made.neg(form.given(made, "q"))))]


def _written_before(made: Program, form: LaunchForm) -> list[fx.Node]:
    p, q = form.given(made, "p"), form.given(made, "q")
    first = form.launched_and_waited(made, p)
    # Launched with the first one, the second would send what was there before the write.
    made.call(aten.mul_.Tensor, q, 2.0)
    return [form.read(made, first), form.read(made, form.launched_and_waited(made, q))]


def _written_before_through_an_alias(made: Program, form: LaunchForm) -> list[fx.Node]:
    p, q = form.given(made, "p"), form.given(made, "q")
    alias = made.call(aten.view.default, q, [-1])
    first = form.launched_and_waited(made, p)
    made.call(aten.mul_.Tensor, alias, 2.0)
    return [form.read(made, first), form.read(made, form.launched_and_waited(made, q))]


def _written_behind(made: Program, form: LaunchForm) -> list[fx.Node]:
    sent = made.neg(form.given(made, "p"))
    first = form.launched_and_waited(made, sent)
    # Launched with the second one, the first would send zeros.
    made.call(aten.mul_.Tensor, sent, 0.0)
    return [form.read(made, first), form.read(made, form.launched_and_waited(made, form.given(made, "q")))]


def _result_written(made: Program, form: LaunchForm) -> list[fx.Node]:
    first, second = (form.launched_and_waited(made, form.given(made, name)) for name in "pq")
    made.call(aten.add_.Tensor, first, 1)
    return [made.neg(first), form.read(made, second)]


def _waited_for_twice(made: Program, form: LaunchForm) -> list[fx.Node]:
    launch = form.launch(made, form.given(made, "p"), "0")
    waits = [made.wait(launch), made.wait(launch), form.launched_and_waited(made, form.given(made, "q"))]
    return [form.read(made, wait) for wait in waits]


def _of_what_was_launched(made: Program, form: LaunchForm) -> list[fx.Node]:
    # The outer launch needs the inner one: these two can never share a bucket.
    twice = form.launched_and_waited(made, form.launched_and_waited(made, form.given(made, "p")))
    return [form.read(made, twice), form.read(made, form.launched_and_waited(made, form.given(made, "q")))]


def _over_two_groups(made: Program, form: LaunchForm) -> list[fx.Node]:
    return [
        form.read(made, form.launched_and_waited(made, form.launched_and_waited(made, form.given(made, name), OTHER)))
        for name in "pq"
    ]


def _in_opposite_nesting(made: Program, form: LaunchForm) -> list[fx.Node]:
    # Merged on both groups, each bucket would need the other: a circle.
    first = form.launched_and_waited(made, form.launched_and_waited(made, form.given(made, "p"), OTHER))
    second = form.launched_and_waited(made, form.launched_and_waited(made, form.given(made, "q")), OTHER)
    return [form.read(made, first), form.read(made, second)]


def _then_all_reduced(made: Program, form: LaunchForm) -> list[fx.Node]:
    return [made.all_reduce(form.launched_and_waited(made, form.given(made, name), OTHER)) for name in "pq"]


def _added(made: Program, form: LaunchForm) -> list[fx.Node]:
    made.backward = True
    u, v, x, y = (form.launched_and_waited(made, form.given(made, name)) for name in "uvxy")
    return [made.add(u, v), made.add(x, y)]


def _to_an_optimizer(made: Program, form: LaunchForm) -> list[fx.Node]:
    made.backward = True
    brought = [form.launched_and_waited(made, form.given(made, name)) for name in "xy"]
    given = [made.given(name, *one.meta["val"].shape) for name, one in zip("pq", brought, strict=True)]
    return [made.call(aten.add.Tensor, p, one, alpha=-0.5) for p, one in zip(given, brought, strict=True)]


def _in_the_backward(made: Program, form: LaunchForm) -> list[fx.Node]:
    made.backward = True
    return [form.read(made, form.launched_and_waited(made, made.neg(form.given(made, name)))) for name in "xy"]


def _in_both_directions(made: Program, form: LaunchForm) -> list[fx.Node]:
    given = {name: form.given(made, name) for name in "pq"}
    found = [form.read(made, form.launched_and_waited(made, given[name])) for name in "pq"]
    made.backward = True
    return [*found, *(form.read(made, form.launched_and_waited(made, given[name])) for name in "qp")]


def _of_two_dtypes(made: Program, form: LaunchForm) -> list[fx.Node]:
    given = [form.given(made, "p", dtype=torch.bfloat16), form.given(made, "q")]
    return [form.read(made, form.launched_and_waited(made, one)) for one in given]


def _of_two_dtypes_and_odd_sizes(made: Program, form: LaunchForm) -> list[fx.Node]:
    given = [form.given(made, "p", made.world, 1, dtype=torch.bfloat16), form.given(made, "q", made.world, 3)]
    return [form.read(made, form.launched_and_waited(made, one)) for one in given]


def _cast_before(made: Program, form: LaunchForm) -> list[fx.Node]:
    casts = [made.call(aten._to_copy.default, form.given(made, name), dtype=torch.bfloat16) for name in "pq"]
    return [form.read(made, form.launched_and_waited(made, cast)) for cast in casts]


def _cast_and_then_written(made: Program, form: LaunchForm) -> list[fx.Node]:
    given = [form.given(made, name) for name in "pq"]
    casts = [made.call(aten._to_copy.default, one, dtype=torch.bfloat16) for one in given]
    made.call(aten.add_.Tensor, given[0], 1)
    return [form.read(made, form.launched_and_waited(made, cast)) for cast in casts]


def _of_views(made: Program, form: LaunchForm) -> list[fx.Node]:
    size = made.world * made.world
    given = [made.call(aten.t.default, form.given(made, name, size, size)) for name in "pq"]
    return [form.read(made, form.launched_and_waited(made, one)) for one in given]


def _seen_as_views(made: Program, form: LaunchForm) -> list[fx.Node]:
    waits = [form.launched_and_waited(made, form.given(made, name)) for name in "pq"]
    return [made.neg(made.call(aten.view.default, wait, [-1])) for wait in waits]


def _on_another_group(made: Program, form: LaunchForm) -> list[fx.Node]:
    return [
        form.read(made, form.launched_and_waited(made, form.given(made, name), group))
        for name, group in (("p", "0"), ("q", OTHER))
    ]


def _on_groups_of_one(made: Program, form: LaunchForm) -> list[fx.Node]:
    return [form.read(made, form.launched_and_waited(made, form.given(made, name), "alone")) for name in "pq"]


def _without_elements(made: Program, form: LaunchForm) -> list[fx.Node]:
    given = [form.given(made, "p", 0, 3), form.given(made, "q")]
    return [form.read(made, form.launched_and_waited(made, one)) for one in given]


def _of_one_value(made: Program, form: LaunchForm) -> list[fx.Node]:
    p = form.given(made, "p")
    return [form.read(made, form.launched_and_waited(made, p)) for _ in range(2)]


def _beside_random_numbers(made: Program, form: LaunchForm) -> list[fx.Node]:
    p, q = form.given(made, "p"), form.given(made, "q")
    first = form.launched_and_waited(made, p)
    chance = made.call(aten.randint_like.default, q, 5)
    return [form.read(made, first), form.read(made, form.launched_and_waited(made, made.add(q, chance))), made.neg(p)]


def _handed_on_as_it_is(made: Program, form: LaunchForm) -> list[fx.Node]:
    given = [form.given(made, name) for name in "pq"]
    return [*(form.launched_and_waited(made, one) for one in given), *given]


def _in_another_module(name: str) -> Twist:
    """Two launches of a module that lies in another, or in a model of that name."""

    def twist(made: Program, form: LaunchForm) -> list[fx.Node]:
        made.module = f"{name}a"
        return _one_by_one(made, form)

    return twist


def _of_a_symbolic_size(made: Program, form: LaunchForm) -> list[fx.Node]:
    given = [made.dynamic(name, made.world * made.world, 3) for name in "pq"]
    given = [made.neg(one) for one in given] if form.writes else given
    return [form.read(made, form.launched_and_waited(made, one)) for one in given]


TWISTS: tuple[Twist, ...] = (
    _one_by_one,
    _together,
    _read_early,
    _written_before,
    _written_before_through_an_alias,
    _written_behind,
    _result_written,
    _waited_for_twice,
    _of_what_was_launched,
    _over_two_groups,
    _in_opposite_nesting,
    _then_all_reduced,
    _added,
    _to_an_optimizer,
    _in_the_backward,
    _in_both_directions,
    _of_two_dtypes,
    _of_two_dtypes_and_odd_sizes,
    _in_another_module("net."),
    _in_another_module("L['model']."),
    _cast_before,
    _cast_and_then_written,
    _of_views,
    _seen_as_views,
    _on_another_group,
    _on_groups_of_one,
    _without_elements,
    _of_one_value,
    _beside_random_numbers,
    _handed_on_as_it_is,
    _of_a_symbolic_size,
)


def _coalesced(kind: str) -> Build:
    """Two tensors in one launch, and a third beside it."""

    def build(made: Program) -> list[fx.Node]:
        form = FORMS[{"all_gather": "gather", "reduce_scatter": "reduce"}.get(kind, kind)]
        p, q, r = (form.given(made, name) for name in "pqr")
        waits = [*made.coalesced(kind, [p, q]), form.launched_and_waited(made, r)]
        return [form.read(made, wait) for wait in waits]

    return build


def _buffers_that_are_read(made: Program) -> list[fx.Node]:
    """Two gathers, each into a buffer that is read besides."""
    nodes = []
    for shard in made.shards("pq"):
        buffer = made.buffer_for(shard)
        nodes += [made.neg(made.gather_into(shard, buffer)), made.neg(buffer)]
    return nodes


def _a_step(made: Program) -> list[fx.Node]:
    """Three layers, forward and backward, whose gradients are reduced and all-reduced."""
    x, shards = made.given("x", made.world * made.world, 3), {name: made.given(name, made.world, 3) for name in "abc"}
    for name, shard in shards.items():
        made.module = name
        x = made.call(aten.mul.Tensor, x, made.gather(shard))
    made.backward = True
    reduced = []
    for name, shard in reversed(shards.items()):
        made.module = name
        gathered = made.gather(shard)
        reduced += [made.reduce(made.call(aten.mul.Tensor, x, gathered), "avg"), made.all_reduce(made.neg(gathered))]
        x = made.call(aten.mul.Tensor, x, gathered)
    return [x, *reduced]


STEP = _a_step
"""The usual training step."""
OFTEN = "gather"
"""The form that every step has."""


def _twisted(twist: Twist, form: LaunchForm, made: Program) -> list[fx.Node]:
    return twist(made, form)


def programs(*forms: str) -> Iterator[Build]:
    """What builds each program: twists of these forms, or of all of them, the plainest first; then what has more launches."""
    for twist in TWISTS:
        for form in forms or FORMS:
            yield partial(_twisted, twist, FORMS[form])
    if not forms:
        yield from (*map(_coalesced, ("all_gather", "reduce_scatter", "all_reduce")), _buffers_that_are_read)
    yield STEP


# What every search begins with. Chance finds what nobody thought of, but takes long where two things must meet; here each way
# to launch meets each twist.


def sweeps(ranks: int, subject: TriedPass) -> Iterator[Iterator[Trial]]:
    """Every program with plain options, and every plan that is wrong; then a sweep for each other value of an option."""
    plain, *others = strategies.one_at_a_time(subject)
    yield chain(
        (_trial(ranks, build, plain) for build in programs()),
        (_trial(ranks, STEP, chosen) for chosen in strategies.wrong_plans(subject)),
        training(ranks) if subject.is_ours else (),
    )
    for chosen in others:
        yield (_trial(ranks, build, chosen) for build in programs(OFTEN))


def training(ranks: int) -> Iterator[Trial]:
    """Whole training steps of three layers, with each kind of update, whose last entries move to the next call."""
    moves = ((2,), (0,), (1, 2))
    for number in range(len(UPDATES)):
        # The usual kinds of update go round by three as well: shifted each time, each of them meets all moves.
        moved = moves[(number + number // len(moves)) % len(moves)]
        layers = [DrawingStep("parameter", layer, number) for layer in range(3)]
        updates = [DrawingStep("update", layer, number, number) for layer in range(3)]
        steps = [*layers, *[DrawingStep("gradient")] * 3, *updates]
        yield PlanChoice(plan=1, updates="ready", moved=moved).trial(drawn(ranks, steps))


def _trial(ranks: int, build: Build, chosen: PlanChoice) -> Trial:
    everybody = list(range(ranks))
    made = Program(ranks, {OTHER: [everybody], "alone": [[rank] for rank in everybody]})
    outputs = build(made)
    graph_module = made.returns(*outputs)
    stacks = [module_stack(node) for node in graph_module.graph.nodes if launch_kind(node) is not None]
    # The last letter is the module as plans name it: the ``a`` of ``net.a``.
    return chosen.of(made, graph_module, [stack[-1][0][-1] for stack in stacks])
