"""Whole phases and steps through the pass, on real ranks before and after, bit for bit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_fxbucket.graph import collectives
from pytest_fxbucket.passes.report import PassReport
from pytest_fxbucket.ranks.pools import Pools
from suites.passes.on_ranks import HALVES, compare
from suites.passes.programs import COLUMNS, SETTINGS, Program, aten, c10d, equal, through
from suites.passes.small_steps import Step

WORLDS = pytest.mark.parametrize("world", [2, 3, 4])


def buckets(report: PassReport) -> Counter[tuple[str, str]]:
    """How many launches of each kind and direction."""
    return Counter((bucket.kind, bucket.direction) for bucket in report.buckets)


@WORLDS
def test_a_forward_alone(pools: Pools, world: int) -> None:
    step = Step(world)
    passed = equal(pools, step, [step.forward()], step.names)
    assert buckets(passed.report) == {("all_gather", "forward"): 3}


@WORLDS
def test_a_backward_alone(pools: Pools, world: int) -> None:
    step = Step(world)
    kept = [step.given(f"kept{i}", 4, step.width) for i in range(3)]
    gradient = step.x
    for layer, x in reversed(list(zip(step.layers, kept, strict=True))):
        gradient = step.back(layer, gradient, x)
    passed = equal(pools, step, [gradient, *step.gradients.values()], step.names)
    assert buckets(passed.report) == {("all_gather", "backward"): 3, ("reduce_scatter", "backward"): 3}


@WORLDS
def test_a_joint_graph_keeps_its_directions_apart(pools: Pools, world: int) -> None:
    step = Step(world)
    y = step.forward()
    step.backwards(y)
    passed = equal(pools, step, [y, *step.gradients.values()], step.names)
    assert buckets(passed.report) == {
        ("all_gather", "forward"): 3,
        ("all_gather", "backward"): 3,
        ("reduce_scatter", "backward"): 3,
    }


@WORLDS
def test_a_backward_gather_is_not_launched_in_the_forward(pools: Pools, world: int) -> None:
    """Each direction has a chain of its own: prefetching across would keep parameters whole over the loss."""
    step = Step(world)
    y = step.forward()
    step.backwards(y)
    passed = through(step, step.returns(y, *step.gradients.values()), step.names, prefetch=9)
    nodes = list(passed.after.graph.nodes)
    last_forward = max(i for i, node in enumerate(nodes) if node.op == "call_function" and "nn_module_stack" in node.meta)
    early = [n for n in nodes[:last_forward] if collectives.is_all_gather(n) and n.meta.get("autograd_backward")]
    assert early == []
    assert compare(pools, passed.before, passed.after, world) == []


@WORLDS
def test_a_reduction_that_feeds_an_optimizer_and_no_output(pools: Pools, world: int) -> None:
    step = Step(world)
    y = step.forward()
    step.backwards(y)
    step.updates()
    passed = equal(pools, step, [y], step.names)
    assert len(passed.launches("reduce_scatter")) == 3


@WORLDS
def test_two_steps_in_one_graph(pools: Pools, world: int) -> None:
    """The second gathers what the first one's optimizer wrote: 9 launches each, none shared."""
    step = Step(world)
    for _ in range(2):
        step.backward, step.gradients = False, {}
        y = step.forward()
        step.backwards(y)
        step.updates()
    passed = equal(pools, step, [y], step.names, (*SETTINGS, {"enabled": False}))
    assert len(passed.launches()) == 18


@WORLDS
def test_a_layer_used_twice_adds_its_gradients_behind_the_bucket(pools: Pools, world: int) -> None:
    """What is gathered anew for the second use is a bucket of its own; the reductions are one."""
    step = Step(world)
    first, second, _ = step.layers
    x = step.start()
    for layer in (first, second, first):
        x = step.run(layer, x)
    step.backward = True
    gradient = step.neg(x)
    for layer in (first, second, first):
        gradient = step.back(layer, gradient)
    passed = equal(pools, step, [x, *step.gradients.values()], step.names[:2])
    assert buckets(passed.report) == {
        ("all_gather", "forward"): 3,
        ("all_gather", "backward"): 3,
        ("reduce_scatter", "backward"): 2,
    }


@WORLDS
def test_a_weight_tied_between_two_entries(pools: Pools, world: int) -> None:
    """Gathered where each reads it; its two gradients are reduced in either's bucket and added."""
    step = Step(world)
    step.layers[2].weight = step.layers[0].weight
    y = step.forward()
    step.backwards(y)
    passed = equal(pools, step, [y, *step.gradients.values()], step.names)
    assert len(passed.launches()) == 9


@WORLDS
def test_collectives_of_activations_are_left_alone(pools: Pools, world: int) -> None:
    """Tensor parallelism: an all-reduce between two layers; sequence parallelism: a gather and a reduce-scatter around one."""
    step = Step(world)
    x = step.run(step.layers[0], step.start())
    x = step.small(step.all_reduce(x))
    x = step.run(step.layers[1], x)
    rows = step.gather(x)
    step.layers[2].x.append(rows)
    weight = step.whole(step.layers[2].weight)
    step.module = "layers.2"
    x = step.small(step.reduce(step.product(rows, weight)))
    last = step.product(x, step.whole(step.layers[2].weight))
    passed = equal(pools, step, [last], step.names)
    assert passed.launches("all_reduce") == ["all_reduce"]
    assert sorted(left.what.partition(" ")[0] for left in passed.report.left_alone) == [
        "all_gather",
        "all_reduce",
        "reduce_scatter",
    ]
    assert all("activation" in reason or "no parameter" in reason for reason in passed.reasons)


@WORLDS
def test_a_forward_recomputed_in_the_backward(pools: Pools, world: int) -> None:
    """Checkpointing: each layer's forward runs again, gathers and all, before its backward, which gathers the weight anew."""
    step = Step(world)
    kept = []
    x = step.start()
    for layer in step.layers:
        kept.append(x)
        x = step.run(layer, x)
    step.backward = True
    gradient = step.neg(x)
    for layer, saved in reversed(list(zip(step.layers, kept, strict=True))):
        again = step.run(layer, saved)
        gradient = step.back(layer, step.small(step.add(gradient, again)), saved)
    passed = equal(pools, step, [x, gradient, *step.gradients.values()], step.names)
    assert buckets(passed.report) == {
        ("all_gather", "forward"): 3,
        ("all_gather", "backward"): 6,
        ("reduce_scatter", "backward"): 3,
    }


@WORLDS
def test_a_step_in_two_precisions(pools: Pools, world: int) -> None:
    """Gathered in bfloat16, reduced in float32."""
    step = Step(world, cast=torch.bfloat16)
    y = step.forward()
    step.backwards(y)
    step.updates()
    passed = equal(pools, step, [y], step.names)
    assert {bucket.dtype for bucket in passed.report.buckets} == {"bfloat16", "float32"}
    assert len(passed.launches()) == 9


@pytest.mark.parametrize("scatter_first", [True, False])
@pytest.mark.parametrize(("inner", "outer"), [("halves", "strided"), ("strided", "halves")])
def test_a_hybrid_step_at_four_ranks(pools: Pools, scatter_first: bool, inner: str, outer: str) -> None:
    """Sharded over pairs, replicated over the other pairs: each entry reduce-scatters once and all-reduces once."""

    class Hybrid(Step):
        def ranks(self, group: str) -> int:
            return super().ranks(inner if group == "0" else group)

        def gather(self, node: fx.Node, group: str = inner) -> fx.Node:
            return super().gather(node, group)

        def reduced(self, gradient: fx.Node) -> fx.Node:
            if scatter_first:
                return self.all_reduce(self.reduce(gradient, "sum", inner), "avg", outer)
            return self.reduce(self.all_reduce(gradient, "sum", outer), "avg", inner)

    step = Hybrid(4, groups=HALVES[4])
    step.width = 4
    for layer in step.layers:
        layer.weight = step.given(f"{layer.weight.name}_half", 2, 4)
    y = step.forward(step.given("y", 4, 4))
    step.backwards(y)
    step.updates()
    passed = equal(pools, step, [y], step.names)
    assert buckets(passed.report) == {
        ("all_gather", "forward"): 3,
        ("all_gather", "backward"): 3,
        ("reduce_scatter", "backward"): 3,
        ("all_reduce", "backward"): 3,
    }


@WORLDS
def test_a_replicated_step(pools: Pools, world: int) -> None:
    """DDP: nothing is gathered, gradients are all-reduced whole."""
    made = Program(world)
    weights = [made.given(f"w{i}", 4, 4) for i in range(4)]
    x, seen = made.given("x", 4, 4), []
    for number, weight in enumerate(weights):
        made.module = f"layers.{number // 2}"
        seen.append(x)
        x = made.call(aten.remainder.Scalar, made.call(aten.mm.default, x, weight), 5)
    made.backward, gradient = True, made.neg(x)
    for number in reversed(range(4)):
        made.module = f"layers.{number // 2}"
        turned = made.call(aten.mm.default, made.call(aten.t.default, seen[number]), gradient)
        made.call(aten.sub_.Tensor, weights[number], made.all_reduce(turned, "avg"))
        gradient = made.call(aten.remainder.Scalar, made.add(gradient, 1.0), 5)
    passed = equal(pools, made, [x], ["layers.0", "layers.1"])
    assert passed.launches() == ["all_reduce"] * 2


@WORLDS
@pytest.mark.parametrize("sizes", [{}, {"rows": 5, "columns": 7}])
def test_symbolic_sizes_stay_right_at_other_sizes(pools: Pools, world: int, sizes: dict[str, int]) -> None:
    """Traced at one size; the merged graph runs at the one that it was traced with, and at another."""

    def gathers(p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        waits = [c10d.wait_tensor(c10d.all_gather_into_tensor(shard, world, "0")) for shard in (p, q)]
        waits.append(c10d.wait_tensor(c10d.reduce_scatter_tensor(waits[0] * 2, "sum", world, "0")))
        waits.append(c10d.wait_tensor(c10d.reduce_scatter_tensor(waits[1] + 1, "sum", world, "0")))
        return [*waits, c10d.wait_tensor(c10d.all_reduce(x, "sum", "0")), c10d.wait_tensor(c10d.all_reduce(x + 1, "sum", "0"))]

    traced = make_fx(gathers, tracing_mode="symbolic")(torch.empty(2, COLUMNS), torch.empty(4), torch.empty(3, 2))
    made = Program(world)
    symbols = sorted(
        {str(s) for n in traced.graph.find_nodes(op="placeholder") for s in n.meta["val"].shape if not isinstance(s, int)}
    )
    given = dict(zip(symbols, sizes.values(), strict=False))
    passed = through(made, traced, by="size", cap_mb=(1.0,))
    assert len(passed.launches()) == 3
    assert compare(pools, traced, passed.after, world, sizes=given) == []
