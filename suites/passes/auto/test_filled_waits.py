"""What compute does while a wait blocks it: it packs what is launched later, and unpacks what has come."""

from __future__ import annotations

import pytest
from torch import fx

from pytest_fxbucket.cost.memory import StorageNeeds
from pytest_fxbucket.graph.order import order_of
from pytest_fxbucket.passes.auto.latest_starts import ideal
from pytest_fxbucket.passes.auto.machine import machine_of
from pytest_fxbucket.passes.auto.windows import Nodes, Windows
from pytest_fxbucket.plan.schema_bucket import Overlap
from suites.graph.handmade import Handmade, aten
from suites.passes.auto.test_by_itself import came_to, estimates

SECONDS = {"aten::mm": 1.0, "all_gather": 0.4, "reduce_scatter": 0.4, "all_reduce": 0.5, "aten::clone": 0.2, "aten::div": 0.1}


def waits_and_gathers(layers: int = 4, *, packs: bool = False, unpacks: bool = False) -> fx.Graph:
    """Layers of an all-reduce that compute waits for, and of a product with a gathered weight, packed or unpacked by a copy."""
    made = Handmade(2)
    weights = [made.param(f"layers.{n}.weight", 8, 16) for n in range(layers)]
    x = made.batch(16, 16)
    for weight in weights:
        x = made.summed(made.call(aten.mm.default, x, x), "1")
        y = made.call(aten.mm.default, x, x)
        gathered = made.gathered(made.call(aten.clone.default, weight) if packs else weight)
        x = made.call(aten.mm.default, y, made.call(aten.clone.default, gathered) if unpacks else gathered)
    made.returns(made.call(aten.sum.default, x), "loss")
    return made.finish()


def test_what_has_come_is_unpacked_while_compute_waits() -> None:
    plain, unpacked = (came_to(waits_and_gathers(unpacks=unpacks), seconds=SECONDS) for unpacks in (False, True))
    assert plain.exposed == 4 * 0.5
    assert abs(unpacked.exposed - 4 * (0.5 - 0.2)) < 1e-9
    assert unpacked.hidden == 4, "each gather"


def test_what_is_launched_later_is_packed_while_compute_waits() -> None:
    assert abs(came_to(waits_and_gathers(packs=True), seconds=SECONDS).exposed - 4 * (0.5 - 0.2)) < 1e-9


@pytest.mark.parametrize("unpacks", [False, True])
def test_what_is_pulled_up_keeps_the_limit_of_memory(unpacks: bool) -> None:
    graph = waits_and_gathers(8, packs=True, unpacks=unpacks)
    exposed = list[float]()
    for share in (0.0, 0.07, 0.2, 1.0):
        bound = came_to(graph, Overlap(max_memory_increase=share), SECONDS)
        assert bound.peak <= bound.peak_before * (1 + share)
        exposed.append(bound.exposed)
    assert exposed[0] > exposed[1] > exposed[-1]
    assert exposed == sorted(exposed, reverse=True), "more room, less exposed"


def test_what_ends_gradients_is_done_while_the_last_is_reduced() -> None:
    made = Handmade(2)
    x = made.batch(16, 16)
    for number in range(3):
        x = made.call(aten.mm.default, x, x)
        made.returns(made.call(aten.div.Tensor, made.reduced(x), 2.0), "grad", f"layers.{number}.weight")
    one = came_to(made.finish(), seconds=SECONDS)
    assert abs(one.exposed - (0.4 - 0.2)) < 1e-9, "two divisions stand in it, and the third reads it"


def test_what_compute_waits_for_in_any_order_is_no_time_to_hide_behind_twice() -> None:
    """Times of slots count waits that no order avoids, so what is launched by them is not launched too early."""
    graph = waits_and_gathers()
    order, of = order_of(graph), estimates(SECONDS)
    machine = machine_of(order.nodes, of)
    windows = Windows(Nodes(order, machine), StorageNeeds(graph))
    assert ideal(windows)[-1] == 8 * 1.0 + 4 * 0.5 + 4 * 1.0
