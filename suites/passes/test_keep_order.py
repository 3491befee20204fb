"""The order of launches, waits and compute behind AOT autograd and inductor, with and without what keeps it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.fuzz.on_ranks import compare
from pytest_fxbucket.fuzz.program import Program, aten, c10d, copied
from pytest_fxbucket.passes.keep_order import forget_order, keep_order
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.step.portable import decode, digest, encode_module

RANKS, SIZE = 8, 64
needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="inductor compiles for CPUs with g++, which is not here"
)


@dataclass(frozen=True)
class Step:
    """Two gathers, the second launched ahead; three reductions, the first waited for behind the others, before more compute."""

    graph_module: fx.GraphModule
    pairs: list[tuple[fx.Node, fx.Node]]
    """Next gather before this wait; next reduction before the deferred wait; that wait before the last compute."""

    def kept(self) -> fx.GraphModule:
        assert keep_order(self.graph_module.graph, self.pairs) == []
        self.graph_module.graph.lint()
        self.graph_module.recompile()
        return self.graph_module


def a_step(ranks: int = RANKS) -> Step:
    made = Program(ranks)
    a, b = made.shards("ab", SIZE // ranks, SIZE)
    x, tall, wide = made.given("x", SIZE, SIZE), made.given("tall", 32 * SIZE, SIZE), made.given("wide", SIZE, 32 * SIZE)
    gather_a, gather_b = made.launch_gather(a), made.launch_gather(b)
    wait_a = made.wait(gather_a)
    y = mm(made, wide, mm(made, tall, mm(made, x, wait_a)))
    y = mm(made, y, made.wait(gather_b))
    first = made.launch_reduce(y)
    between = made.launch_reduce(mm(made, y, x))
    z = mm(made, y, y)
    second = made.launch_reduce(z)
    wait_first = made.wait(first)
    last = mm(made, z, z)
    waits = [wait_first, made.wait(second), made.wait(between)]
    graph_module = made.returns(mm(made, last, last), *waits)
    return Step(graph_module, [(gather_b, wait_a), (second, wait_first), (wait_first, last)])


def mm(made: Program, a: fx.Node, b: fx.Node) -> fx.Node:
    return made.call(aten.mm.default, a, b)


BEGINS = ["launch", "launch", "wait", "mm", "mm", "mm", "wait", "mm", "launch", "mm", "launch", "mm", "launch", "wait", "mm"]
"""What the pairs promise of :func:`a_step`."""
SCHEDULE = [*BEGINS, "wait", "wait", "mm"]


def inputs() -> list[torch.Tensor]:
    return [torch.ones(shape) for shape in ((8, SIZE), (8, SIZE), (SIZE, SIZE), (32 * SIZE, SIZE), (SIZE, 32 * SIZE))]


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    torch._dynamo.reset()
    with fake_world(0, RANKS):
        yield


def words(graph: fx.Graph) -> list[str]:
    kinds = {c10d.wait_tensor.default: "wait", aten.mm.default: "mm"}
    kinds |= {c10d.all_gather_into_tensor.default: "launch", c10d.reduce_scatter_tensor.default: "launch"}
    return [kinds[node.target] for node in graph.nodes if node.target in kinds]


def through_aot(graph_module: fx.GraphModule) -> list[str]:
    """Order in the graph that a compiler gets behind dynamo and AOT autograd."""
    from torch._dynamo.backends.common import aot_autograd

    found: list[str] = []

    def compiler(given: fx.GraphModule, _: Sequence[Any]) -> fx.GraphModule:
        found.extend(words(given.graph))
        return given

    torch.compile(graph_module, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(*inputs())
    return found


_CALLS = re.compile(r"^\s*(?:buf\d+ = )?(?:torch\.ops\._c10d_functional\.|extern_kernels\.)(\w+)", re.M)


def through_inductor(graph_module: fx.GraphModule) -> list[str]:
    """Order in the code that inductor writes behind dynamo and AOT autograd."""
    from torch._inductor.utils import run_and_get_code

    _, code = run_and_get_code(torch.compile(graph_module, backend="inductor", fullgraph=True), *inputs())
    return [{"mm": "mm", "wait_tensor": "wait"}.get(name, "launch") for name in _CALLS.findall(code[0])]


def test_aot_autograd_keeps_the_order_and_raises_nothing_for_the_alias() -> None:
    with torch._functorch.config.patch(error_on_custom_op_aliasing=True):  # as CI=1 sets it
        assert through_aot(a_step().kept()) == SCHEDULE


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor compiles anew: code of an older operator tells nothing."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


@needs_compiler
@pytest.mark.usefixtures("no_cache")
def test_inductor_keeps_the_order_that_it_would_lose() -> None:
    assert through_inductor(a_step().graph_module)[: len(BEGINS)] != BEGINS
    torch._dynamo.reset()

    assert through_inductor(a_step().kept())[: len(BEGINS)] == BEGINS


@needs_compiler
@pytest.mark.usefixtures("no_cache")
def test_inductor_gives_no_memory_away_that_is_read_behind_another_tensor() -> None:
    def step(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        x = a @ b
        (same,) = torch.ops.fxbucket.after(x, [a])  # the last to read x by its name
        y = a @ a
        z = (y @ b) @ y
        return [same @ z, y]

    numbers = torch.arange(256.0).reshape(16, 16) % 5

    assert all(map(torch.equal, torch.compile(step, fullgraph=True)(numbers, numbers.t()), step(numbers, numbers.t())))


def test_a_graph_whose_order_is_kept_computes_the_same_on_ranks(pools: Pools) -> None:
    step = a_step(2)
    before = copied(step.graph_module)
    assert compare(pools, before, step.kept(), 2) == []


def test_a_kept_order_travels_and_can_be_taken_back() -> None:
    step = a_step()
    before = digest(encode_module(step.graph_module))
    sent = encode_module(step.kept())

    assert digest(encode_module(decode(sent))) == digest(sent) != before
    forget_order(step.graph_module.graph)
    assert digest(encode_module(step.graph_module)) == before


def test_what_is_only_written_or_is_a_view_is_not_read_through_an_operator_and_said() -> None:
    made = Program(2)
    (a,) = made.shards("a")
    waited = made.wait(made.launch_gather(a))
    x, y = made.given("x", 4, 3), made.given("y", 4, 3)
    written = made.call(aten.add_.Tensor, x, y)
    seen = made.call(aten.t.default, y)
    zeroed = made.call(aten.zero_.default, y)
    graph_module = made.returns(written, seen, zeroed)

    assert keep_order(graph_module.graph, [(waited, written), (waited, seen), (waited, zeroed)]) == [
        (waited, seen),
        (waited, zeroed),
    ]
    assert written.args[0] is x  # which later compilers must see it write
    assert written.args[1] is not y


def test_a_coalesced_launch_is_kept_by_what_it_launched() -> None:
    made = Program(2)
    a, b, c = made.shards("abc")
    several = made.coalesced("all_gather", [a, b])
    launch = several[0].args[0].args[0]
    wait = made.gather(c)
    graph_module = made.returns(wait, *several)
    order = list(graph_module.graph.nodes)

    assert keep_order(graph_module.graph, [(launch, wait)]) == []
    graph_module.graph.lint()
    assert launch.next.target is getitem  # read where it is launched, so that nobody moves it down
    assert launch.next in wait.args[0].args[0].all_input_nodes
    forget_order(graph_module.graph)
    assert list(graph_module.graph.nodes) == order


def test_an_operator_that_gives_several_tensors_comes_before_a_wait(pools: Pools) -> None:
    made = Program(2)
    a, b = made.shards("ab")
    launch = made.launch_gather(b)
    parts = made.call(aten.split_with_sizes_copy.default, made.gather(a), [1, 3])
    part, wait = made.call(getitem, parts, 1), made.wait(launch)
    graph_module = made.returns(wait, part)
    before = copied(graph_module)
    order = list(graph_module.graph.nodes)

    assert keep_order(graph_module.graph, [(parts, wait)]) == []
    graph_module.recompile()
    assert compare(pools, before, graph_module, 2) == []
    forget_order(graph_module.graph)
    assert list(graph_module.graph.nodes) == order
