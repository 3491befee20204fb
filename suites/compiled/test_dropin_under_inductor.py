"""The drop-in as inductor's pass: what it makes is compiled, in each of the hooks that torch's goes into."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import fx
from torch._inductor.lowering import lowerings

from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.fuzz.program import Program
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.graph.ops import overload
from pytest_fxbucket.passes import bucketing_post_grad_pass, manual_overlap_bucketing
from suites.compiled.rank_jobs_of_compiled import WITHOUT_CODE
from suites.compiled.small_nets import PLAN, net_of_dtensors, step
from suites.passes.packing import packed

pytestmark = pytest.mark.usefixtures("last_of_two_ranks", "no_cache")
HOOKS = ("post_grad_custom_post_pass", "post_grad_custom_pre_pass", "joint_custom_pre_pass", "joint_custom_post_pass")


@pytest.fixture
def last_of_two_ranks() -> Iterator[None]:
    """Its rows are padded where two ranks do not divide them."""
    torch._dynamo.reset()
    with fake_world(1, 2):
        yield


@pytest.fixture
def no_cache() -> Iterator[None]:
    with torch.compiler.config.patch(force_disable_caches=True):
        yield


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_of_inductor_s_takes_it(hook: str) -> None:
    launches: list[tuple[int, int]] = []

    def bucketed(graph: fx.Graph) -> None:
        before = counted(graph)
        assert graph.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default), graph
        gm = graph.owning_module
        assert gm is not None
        launches.append((before, counted(manual_overlap_bucketing(gm, PLAN, insert_overlap_deps=True).graph)))

    model = net_of_dtensors(2, width=5)
    step(torch.compile(model, options={hook: bucketed, **WITHOUT_CODE}, fullgraph=True))
    assert launches == ([(10, 6)] if hook.startswith("joint") else [(5, 3), (5, 3)])
    assert all(parameter.grad is not None for parameter in model.parameters())


def counted(graph: fx.Graph) -> int:
    return sum(launch_kind(node) is not None for node in graph.nodes)


FORMS = ("gather", "reduce", "all_reduce", "several dtypes")


@pytest.mark.parametrize("form", FORMS)
def test_inductor_has_code_for_every_operator_of_a_pack(form: str) -> None:
    made = Program(2)
    tensors = [made.given(f"p{i}", *shape) for i, shape in enumerate([(2, 5), (4, 3), (6,)])]
    if form == "several dtypes":
        tensors.append(made.given("q", 3, dtype=torch.bfloat16))
        form = "gather"
    built = packed(made.returns(*made.together(form, tensors)).graph, 2)
    made_by_pass = {op for node in (*built.pack, *built.unpack) if (op := overload(node))}
    assert len(made_by_pass) > 2
    assert made_by_pass - lowerings.keys() == set()


def test_what_a_packer_of_one_s_own_makes_is_broken_down_as_inductor_has_broken_down_the_rest() -> None:
    made = Program(2)
    made.module = "a"
    graph = made.returns(*(made.neg(made.gather(made.given(name, 2, 3))) for name in "pq")).graph
    bucketing_post_grad_pass(["a"], packer="suites.passes.test_packers:joined", insert_overlap_deps=False)(graph)
    assert counted(graph) == 1
    graph.lint()
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert [copy.all_input_nodes[0].meta["val"].shape for copy in copies] == [(2, 6), (2, 6)]  # of ``split_with_sizes_copy``
