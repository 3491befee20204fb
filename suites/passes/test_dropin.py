"""The drop-in function: called as torch's is, and the same buckets."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import fx

from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.compat.torch_pass import torch_manual_overlap_bucketing
from pytest_fxbucket.fuzz.program import Program, aten
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.passes import manual_overlap_bucketing
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.plan_on_mesh import PlanOnMesh
from pytest_fxbucket.step.roles import Value
from suites.passes.bucketing import world_of
from suites.passes.programs import chain, launches


def members(gm: fx.GraphModule) -> list[tuple[str, str, tuple[str, ...]]]:
    """(kind, direction, members) of each launch, every placeholder being a parameter."""
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    returned = gm.graph.output_node().args[0]
    assert isinstance(returned, (list, tuple))
    outputs = [Value("grad", f"grad {i}", (), None) for i in range(len(returned))]
    reading = read_graph(gm.graph, [Value("param", name, (), None) for name in names], outputs)
    assert reading.problems == ()
    return [(bucket.kind, bucket.direction, bucket.fqns) for bucket in reading.buckets]


def gathered(gm: fx.GraphModule) -> list[tuple[str, ...]]:
    return [fqns for kind, _, fqns in members(gm) if kind == "all_gather"]


A, B, C = (tuple(f"{module}_{name}" for name in ("weight", "scale")) for module in "abc")


def test_it_is_called_as_torch_s_is() -> None:
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing as of_torch

    ours, theirs = (inspect.signature(f).parameters.values() for f in (manual_overlap_bucketing, of_torch))
    known = len(theirs)  # torch 2.11's has no bucket_mode yet, which comes last
    assert [(p.name, p.default, p.kind) for p in ours][:known] == [(p.name, p.default, p.kind) for p in theirs]
    assert known == 5 or torch.__version__ < "2.12"


def test_it_changes_the_graph_module_that_it_is_given_and_returns_it() -> None:
    gm = chain()
    code = gm.code
    assert manual_overlap_bucketing(gm, [["a", "c"], "b"]) is gm
    assert gm.code != code
    assert gathered(gm) == [A + C, B]


def test_a_bucket_takes_what_lies_below_its_module_and_nothing_else() -> None:
    gm = chain(["layers.1", "layers.10", "layers"])
    manual_overlap_bucketing(gm, ["layers.1"])
    assert gathered(gm)[0] == ("layers_1_weight", "layers_1_scale")
    assert [len(fqns) for fqns in gathered(gm)] == [2, 1, 1, 1, 1]
    gm = chain(["layers.0.wq", "layers.0.wk"])
    manual_overlap_bucketing(gm, ["layers.0"])
    assert [len(fqns) for fqns in gathered(gm)] == [4]


def test_an_entry_may_be_written_as_in_a_plan_file() -> None:
    plans = {"layers.[0-1]": [2, 2, 1, 1], "layers.*": [2, 2, 2], "layers.0+layers.2": [4, 1, 1], "layers.*+x": [6]}
    for selector, sizes in plans.items():
        gm = chain(["layers.0", "layers.1", "layers.2"] if "x" not in selector else ["layers.0", "layers.1", "x"])
        manual_overlap_bucketing(gm, [selector])
        assert [len(fqns) for fqns in gathered(gm)] == sizes, selector


@pytest.mark.parametrize("mode", [None, "default", "custom_ops", "custom_ops_multidtype"])
def test_every_mode_of_torch_s_that_packs_is_taken(mode: str | None) -> None:
    gm = chain(backward=True)
    manual_overlap_bucketing(gm, ["a", "b", "c"], bucket_mode=mode)
    assert [(kind, len(fqns)) for kind, _, fqns in members(gm)] == [("all_gather", 2)] * 3 + [("reduce_scatter", 2)] * 3


@pytest.mark.parametrize(("mode", "count"), [("custom_ops", 2), ("custom_ops_multidtype", 1)])
def test_a_gather_of_two_dtypes_is_one_launch_if_the_mode_says_so(mode: str, count: int) -> None:
    made = Program(4)
    weight, scale = made.shards("ws")
    half = made.call(aten._to_copy.default, scale, dtype=torch.bfloat16)
    gm = made.returns(made.gather(weight), made.gather(half))
    assert len(launches(manual_overlap_bucketing(gm, ["a"], bucket_mode=mode).graph)) == count


@pytest.mark.parametrize("deps", [False, True])
def test_dependencies_are_asked_of_the_pass(deps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(ManualPass, "apply", lambda self, graph, targets: asked.append(self.overlap.insert_overlap_deps))
    manual_overlap_bucketing(chain(), ["a"], deps)
    assert asked == [deps]


def test_the_caller_s_module_stack_is_asked_instead() -> None:
    gm = chain()
    marks = {node.name: list(node.meta.pop("nn_module_stack", {"": ""}))[-1] for node in gm.graph.nodes}

    def stack(node: fx.Node) -> list[tuple[str, type]]:
        return [("", torch.nn.Module), (f"mine.{marks[node.name]}", torch.nn.Module)]

    manual_overlap_bucketing(gm, ["mine.b"], module_stack_fn=stack)
    assert [len(fqns) for fqns in gathered(gm)] == [1, 1, 2, 1, 1]


@pytest.mark.parametrize("reduce_order", ["scatter_first", "replicate_first"])
def test_gradients_that_are_reduced_twice_lie_in_their_buckets_as_a_plan_lays_them_out(reduce_order: str) -> None:
    """Bytes of a bucket decide the order of sums: a checked plan must say what training with the drop-in computes."""
    plans = world_of("late", mode="hybrid_shard", dp_replicate=2, reduce_order=reduce_order)
    dropped_in = plans.by_pass("pytest_fxbucket.passes:manual_overlap_bucketing")
    assert laid_out(dropped_in) == laid_out(plans)


def laid_out(world: PlanOnMesh) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """Kind, direction, group and members of each launch."""
    return sorted((b.kind, b.direction, b.group, b.fqns) for b in world.passed(0)["joint"].reading.buckets)


def test_a_plan_without_entries_leaves_the_graph_as_it_is() -> None:
    gm = chain(backward=True)
    nodes, code = list(gm.graph.nodes), gm.code
    assert manual_overlap_bucketing(gm, [], insert_overlap_deps=True) is gm
    assert (list(gm.graph.nodes), gm.code) == (nodes, code)


SAID = ("nn_module_stack", "stack_trace", "custom")


def test_merged_nodes_keep_what_torch_s_keep_of_modules_lines_and_annotations() -> None:
    ours, theirs = (annotated(chain(backward=True)) for _ in range(2))
    before = set(ours.graph.nodes)
    manual_overlap_bucketing(ours, ["a"])
    with fake_world(0, 4):
        theirs = torch_manual_overlap_bucketing(theirs, ["a"])
    wanted, got = ({launch_kind(node): node.meta for node in merged(gm)} for gm in (theirs, ours))
    assert got.keys() == wanted.keys() == {"all_gather", "reduce_scatter"}
    for kind, meta in got.items():
        for key in SAID:
            assert meta[key] == wanted[kind][key], (kind, key)
            assert list(meta[f"bucketing_{key}_sources"]) == list(wanted[kind][f"bucketing_{key}_sources"]), (kind, key)
        assert [source.name for source in meta["from_node"]] == [source.name for source in wanted[kind]["from_node"]]
    made = [node for node in ours.graph.nodes if node not in before]
    assert [node for node in made if not all(node.meta.get(key) for key in (*SAID, "from_node"))] == []


def annotated(gm: fx.GraphModule) -> fx.GraphModule:
    """With a line of code and an annotation for each node."""
    for number, node in enumerate(gm.graph.nodes):
        node.meta |= {"stack_trace": f"line {number}", "custom": {"number": number}}
    return gm


def merged(gm: fx.GraphModule) -> list[fx.Node]:
    """Launches that say of several nodes what they were."""
    return [node for node in gm.graph.nodes if launch_kind(node) and len(node.meta.get("from_node", ())) > 1]


def test_merged_nodes_are_named_as_those_who_look_for_them_in_traced_graphs_expect() -> None:
    gm = chain(["a", "b"], backward=True)
    manual_overlap_bucketing(gm, ["a", "b"])
    names = [node.name for node in gm.graph.nodes if launch_kind(node)]
    assert names == ["all_gather_into_tensor", "all_gather_into_tensor_1", "reduce_scatter_tensor", "reduce_scatter_tensor_1"]
