"""The drop-in function: called as torch's is, and an error where that one does nothing or guesses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hand_made import chain, launch_names
from torch import fx

from pytest_fxbucket.capture.roles import Value
from pytest_fxbucket.compat.fake_group import fake_world
from pytest_fxbucket.compat.torch_pass import torch_manual_overlap_bucketing
from pytest_fxbucket.errors import FxbucketError, PlanError
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.passes import manual_overlap_bucketing


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
    assert [(p.name, p.default, p.kind) for p in ours] == [(p.name, p.default, p.kind) for p in theirs]


def test_it_changes_the_graph_module_that_it_is_given_and_returns_it() -> None:
    gm = chain()
    code = gm.code
    assert manual_overlap_bucketing(gm, ["a", "b", "c"]) is gm
    assert gm.code != code
    assert gathered(gm) == [A, B, C]


def test_an_entry_is_an_fqn_or_a_list_of_them() -> None:
    gm = chain()
    manual_overlap_bucketing(gm, [["a", "c"], "b"])
    assert gathered(gm) == [A + C, B]


def test_a_bucket_takes_what_lies_below_its_module_and_nothing_else() -> None:
    gm = chain(["layers.1", "layers.10", "layers"])
    manual_overlap_bucketing(gm, ["layers.1"])
    assert gathered(gm)[0] == ("layers_1_weight", "layers_1_scale")
    assert [len(fqns) for fqns in gathered(gm)] == [2, 1, 1, 1, 1]
    gm = chain(["layers.0.wq", "layers.0.wk"])
    manual_overlap_bucketing(gm, ["layers.0"])
    assert [len(fqns) for fqns in gathered(gm)] == [4]


@pytest.mark.parametrize("mode", [None, "default", "custom_ops"])
def test_the_modes_that_are_built_are_taken(mode: str | None) -> None:
    gm = chain(backward=True)
    manual_overlap_bucketing(gm, ["a", "b", "c"], bucket_mode=mode)
    assert [(kind, len(fqns)) for kind, _, fqns in members(gm)] == [("all_gather", 2)] * 3 + [("reduce_scatter", 2)] * 3


Call = Callable[[fx.GraphModule], Any]
REFUSED: dict[str, tuple[Call, str]] = {
    "a string": (lambda gm: manual_overlap_bucketing(gm, "a"), "not 'a'"),
    "None": (lambda gm: manual_overlap_bucketing(gm, None), "not None"),  # type: ignore[arg-type]
    "a number": (lambda gm: manual_overlap_bucketing(gm, 3), "not 3"),  # type: ignore[arg-type]
    "no entry": (lambda gm: manual_overlap_bucketing(gm, []), "not []"),
    "an entry that is None": (lambda gm: manual_overlap_bucketing(gm, ["a", None]), "entry None"),  # type: ignore[list-item]
    "an entry that is a number": (lambda gm: manual_overlap_bucketing(gm, ["a", 3]), "entry 3"),  # type: ignore[list-item]
    "an entry without a name": (lambda gm: manual_overlap_bucketing(gm, ["a", []]), "entry []"),
    "an empty name": (lambda gm: manual_overlap_bucketing(gm, ["a", ""]), "entry ''"),
    "a blank name": (lambda gm: manual_overlap_bucketing(gm, ["a", ["b", " "]]), "entry ['b', ' ']"),
    "a name that is a number": (lambda gm: manual_overlap_bucketing(gm, [["b", 3]]), "entry ['b', 3]"),  # type: ignore[list-item]
    "an unknown module": (lambda gm: manual_overlap_bucketing(gm, ["a", "d"]), "entry 'd' matches no collective"),
    "one unknown of two": (lambda gm: manual_overlap_bucketing(gm, [["a", "d"]]), "'d' in entry 'a+d' matches no collective"),
    "an entry twice": (lambda gm: manual_overlap_bucketing(gm, ["a", "a"]), "entry 'a' overlaps entry 'a'"),
    "a name twice": (lambda gm: manual_overlap_bucketing(gm, [["a", "a"]]), "overlaps"),
    "a module and one within": (
        lambda gm: manual_overlap_bucketing(gm, ["a", ["b", "a.x"]]),
        "entry 'b+a.x' overlaps entry 'a': a.x and a share modules",
    ),
    "an unknown mode": (
        lambda gm: manual_overlap_bucketing(gm, ["a"], bucket_mode="custom"),
        "bucket_mode 'custom' is unknown",
    ),
    "a mode of several dtypes": (
        lambda gm: manual_overlap_bucketing(gm, ["a"], bucket_mode="custom_ops_multidtype"),
        "'custom_ops_multidtype' is not built yet",
    ),
    "a coalesced mode": (lambda gm: manual_overlap_bucketing(gm, ["a"], bucket_mode="coalesced"), "not built yet"),
    "dependencies": (lambda gm: manual_overlap_bucketing(gm, ["a"], True), "insert_overlap_deps = True is not built yet"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said_and_the_graph_is_as_it_was(case: str) -> None:
    call, message = REFUSED[case]
    gm = chain(backward=True)
    code, graph, text, metas = gm.code, gm.graph, str(gm.graph), [dict(node.meta) for node in gm.graph.nodes]
    with pytest.raises(FxbucketError) as error:
        call(gm)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, PlanError)
    assert gm.code == code
    assert gm.graph is graph
    assert str(graph) == text
    assert [node.meta for node in graph.nodes] == metas


def test_an_unknown_module_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(PlanError, match=r"modules with collectives: a, b, c$"):
        manual_overlap_bucketing(chain(), ["layers.0"])


def test_a_graph_without_metadata_is_refused() -> None:
    gm = chain()
    for node in gm.graph.nodes:
        node.meta = {"val": node.meta.get("val")}
    with pytest.raises(PlanError, match="entry 'a' matches no collective; modules with collectives: none"):
        manual_overlap_bucketing(gm, ["a"])


STACKS = {
    "dynamo": "L['self']._modules['layers']._modules['{}']",
    "dynamo, indexed": "L['self']._modules['layers']['{}']",
    "dynamo, attributes": "L['self'].layers.{}",
    "dynamo, list": "L['self'].layers[{}]",
    "another variable": "L['model']._modules['layers']._modules['{}']",
    "another variable, attributes": "L['fn'].layers.{}",
    "plain": "layers.{}",
}


@pytest.mark.parametrize("key", ["nn_module_stack", "fwd_nn_module_stack"])
@pytest.mark.parametrize("spelling", STACKS)
def test_every_spelling_of_a_module_is_understood(spelling: str, key: str) -> None:
    gm = chain()
    for node in gm.graph.nodes:
        if stack := node.meta.pop("nn_module_stack", None):
            name = STACKS[spelling].format("abc".index([*stack][-1])) if [*stack][-1] else "L['self']"
            node.meta[key] = {"root": ("", torch.nn.Module), "inner": (name, torch.nn.Linear)}
    manual_overlap_bucketing(gm, ["layers.0", ["layers.1", "layers.2"]])
    assert gathered(gm) == [A, B + C]


def test_the_caller_s_module_stack_is_asked_instead() -> None:
    gm = chain()
    marks = {node.name: list(node.meta.pop("nn_module_stack", {"": ""}))[-1] for node in gm.graph.nodes}

    def stack(node: fx.Node) -> list[tuple[str, type]]:
        return [("", torch.nn.Module), (f"mine.{marks[node.name]}", torch.nn.Module)]

    manual_overlap_bucketing(gm, ["mine.b"], module_stack_fn=stack)
    assert [len(fqns) for fqns in gathered(gm)] == [1, 1, 2, 1, 1]


def test_on_its_own_output_it_says_that_nothing_is_left_to_merge() -> None:
    gm = chain()
    manual_overlap_bucketing(gm, ["a", "b", "c"])
    code = gm.code
    with pytest.raises(PlanError, match="entry 'a' matches no collective"):
        manual_overlap_bucketing(gm, ["a", "b", "c"])
    assert gm.code == code


@pytest.mark.parametrize("plan", [["a", "b", "c"], ["a", ["b", "c"]]])
def test_buckets_are_those_of_torch_s_pass(plan: list[str | list[str]]) -> None:
    ours, theirs = chain(), chain()
    manual_overlap_bucketing(ours, plan)
    with fake_world(0, 4):
        theirs = torch_manual_overlap_bucketing(theirs, plan)
    assert gathered(theirs) == gathered(ours)
    assert len(launch_names(theirs)) == len(launch_names(ours)) == len(plan)
