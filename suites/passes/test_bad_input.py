"""What cannot be meant is said in one sentence that names the entry and the nearest names, and the graph is as it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from pytest_fxbucket.errors import PassError, PlanError
from pytest_fxbucket.fuzz.program import Program, aten
from pytest_fxbucket.passes import manual_overlap_bucketing
from pytest_fxbucket.passes.manual import ManualPass
from pytest_fxbucket.passes.merge import build
from pytest_fxbucket.passes.targets import by_module
from suites.passes.programs import chain


def layers() -> fx.GraphModule:
    """Layers 0 to 2 with collectives, and modules ``norm`` and ``layers.3`` that have compute alone."""
    gm = chain(["embed", "layers.0", "layers.1", "layers.2"], backward=True)
    first = next(node for node in gm.graph.nodes if node.target is aten.neg.default)
    for module in ("layers.3", "norm"):
        with gm.graph.inserting_before(first):
            node = gm.graph.call_function(aten.neg.default, first.args)
        node.meta = {**first.meta, "nn_module_stack": {"": ("", torch.nn.Module), module: (module, torch.nn.Module)}}
        first.replace_input_with(first.all_input_nodes[0], node)
        first = node
    gm.recompile()
    return gm


def assert_refused(gm: fx.GraphModule, call: Callable[[], Any], *says: str) -> None:
    """One sentence with all of ``says``; code, nodes and metadata are the very same."""
    graph, code, text = gm.graph, gm.code, str(gm.graph)
    nodes = list(graph.nodes)
    metas = [node.meta for node in nodes]
    held = [dict(meta) for meta in metas]
    with pytest.raises((PlanError, PassError)) as caught:
        call()
    message = str(caught.value)
    for words in says:
        assert words in message
    assert "\n" not in message
    assert gm.graph is graph
    assert (gm.code, str(graph)) == (code, text)
    assert len(graph.nodes) == len(nodes)
    for node, before, meta, values in zip(graph.nodes, nodes, metas, held, strict=True):
        assert node is before
        assert node.meta is meta
        assert list(meta) == list(values)
        assert all(meta[key] is values[key] for key in values)


PLANS: dict[str, tuple[Any, Sequence[str]]] = {
    "a string": ("embed", ["module_bucket_plans must be a list of entries", 'not "embed"']),
    "None": (None, ["module_bucket_plans must be a list of entries", "not None"]),
    "a table": ({"embed": 1}, ["must be a list of entries"]),
    "an entry that is None": (["embed", None], ["has None as an entry"]),
    "an entry without a name": (["embed", []], ["has an empty list as an entry"]),
    "a blank name": (["embed", ["layers.0", " "]], ["has an empty entry"]),
    "a name that is a number": ([["embed", 3]], ["has 3 in an inner list"]),
    "a list too deep": ([["embed", ["layers.0"]]], ["in an inner list"]),
    "dots too many": (["layers..0"], ['entry "layers..0" is no name']),
    "a space within": (["layers .0"], ['entry "layers .0" is no name']),
    "an unknown module": (["embde"], ['entry "embde" matches nothing', 'did you mean "embed"?']),
    "a prefix too many": (["model.layers.0"], ['"layers.0" exists, so write it without "model."']),
    "no collective": (["norm"], ['entry "norm" is a module without collectives; take it out']),
    "no collective, one of two": ([["embed", "norm"]], ['entry "embed+norm": "norm" is a module without collectives']),
    "an entry twice": (["embed", "embed"], ['entry "embed" is there twice']),
    "a prefix that swallows": (["layers", "layers.1"], ['entries "layers" and "layers.1" both hold layers.1']),
    "a star and one of it": (["layers.*", "layers.2"], ['entry "layers.2" is there twice (once from "layers.*")']),
    "a range past collectives": (["layers.[1-3]"], ['entry "layers.3" is a module without collectives']),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_that_cannot_be_meant_leaves_the_graph_as_it_was(case: str) -> None:
    gm = layers()
    plan, says = PLANS[case]
    assert_refused(gm, lambda: manual_overlap_bucketing(gm, plan), *says)


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown mode": ({"bucket_mode": "custom_op"}, 'not "custom_op"; did you mean "custom_ops"?'),
    "a mode that is a list": ({"bucket_mode": ["default"]}, "bucket_mode must be None, "),
    "a coalesced mode": ({"bucket_mode": "coalesced"}, 'bucket_mode "coalesced" is refused'),
    "dependencies that are a string": ({"insert_overlap_deps": "no"}, 'insert_overlap_deps must be True or False, not "no"'),
    "a stack that is a string": ({"module_stack_fn": "embed"}, 'module_stack_fn must be callable(node) or None, not "embed"'),
    "a stack of None": ({"module_stack_fn": lambda node: None}, "module_stack_fn gave None, expected a list of (module FQN"),
    "a stack of names": ({"module_stack_fn": lambda node: ["a"]}, 'gave a list with "a" in it, expected (module FQN, class)'),
    "a stack of nothing": ({"module_stack_fn": lambda node: []}, "module_stack_fn names no module for any of 16 collectives"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_that_cannot_be_meant_leaves_the_graph_as_it_was(case: str) -> None:
    gm = layers()
    arguments, says = ARGUMENTS[case]
    assert_refused(gm, lambda: manual_overlap_bucketing(gm, ["embed"], **arguments), says)


def test_what_is_no_graph_module_is_refused() -> None:
    with pytest.raises(PlanError, match=r"gm must be a torch\.fx\.GraphModule, not a value of type Graph"):
        manual_overlap_bucketing(chain().graph, ["a"])


def test_a_graph_without_module_names_says_what_would_help() -> None:
    gm = chain()
    for node in gm.graph.nodes:
        node.meta.pop("nn_module_stack", None)
    says = ("no collective carries a module's name (nn_module_stack or fwd_nn_module_stack", "module_stack_fn", "by size")
    assert_refused(gm, lambda: manual_overlap_bucketing(gm, ["a"]), *says)


def test_a_graph_without_collectives_is_no_silent_nothing() -> None:
    made = Program(4)
    gm = made.returns(*map(made.neg, made.shards("x")))
    assert_refused(gm, lambda: manual_overlap_bucketing(gm, ["a"]), "the graph launches no collective")


def test_what_no_entry_of_a_plan_file_names_is_an_error_there_or_the_entry_root() -> None:
    plans = [("layers.*", ["layers.*"])]
    with pytest.raises(PlanError) as caught:
        by_module(layers().graph, plans, where="p.toml: [bucket] plan", unplanned="error")
    message = str(caught.value)
    assert message.startswith("p.toml: [bucket] plan: 4 collectives are in no entry, those of modules embed; add an entry")
    assert by_module(layers().graph, plans, unplanned="allow").entries == ("layers.0", "layers.1", "layers.2")
    root = by_module(layers().graph, plans, unplanned="root")
    assert root.entries[-1] == "root"
    assert [target.entry for target in root.planned].count("root") == 4
    with pytest.raises(PlanError, match='entry "root" has the name that unplanned = "root" gives to the rest'):
        by_module(layers().graph, [("root", ["layers.0", "layers.1"])], unplanned="root")


def test_an_activation_of_no_entry_is_no_error() -> None:
    made = Program(4)
    weight, x = made.shards(["weight", "x"], 2, 2)
    gathered = made.gather(weight)
    made.module = "tp"
    gm = made.returns(gathered, made.gather(made.call(aten.mm.default, made.neg(x), weight)))
    for unplanned in ("error", "root"):
        targets = by_module(gm.graph, [("a", ["a"])], unplanned=unplanned)
        assert [target.entry for target in targets.planned] == ["a"]
        assert [left.reason for left in targets.left_alone] == ["it gathers what mm_default computes, no parameter"]


def test_a_graph_that_is_not_in_order_is_refused_by_name() -> None:
    gm = layers()
    launch = next(node for node in gm.graph.nodes if node.target is aten.mul.Tensor)
    launch.append(launch.all_input_nodes[1])
    assert_refused(gm, lambda: manual_overlap_bucketing(gm, ["embed"]), "not in order", launch.name)


def test_a_bucket_that_cannot_be_built_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def breaking(*args: Any, **kwargs: Any) -> Any:
        if built:
            raise PassError("the second bucket cannot be built")
        built.append(build(*args, **kwargs))
        return built[0]

    monkeypatch.setattr("pytest_fxbucket.passes.merge.build", breaking)
    gm = layers()
    assert_refused(gm, lambda: manual_overlap_bucketing(gm, ["embed", "layers.0"]), "the second bucket")
    assert built


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prefetch": "2"}, 'ManualPass: prefetch must be a whole number of at least 0, not "2"'),
        ({"prefetch": -1}, "ManualPass: prefetch must be a whole number of at least 0, not -1"),
        ({"defer_reduce": 1}, "ManualPass: defer_reduce must be true or false, not 1"),
        ({"layout": "executoin"}, 'did you mean "execution"?'),
        ({"launch_at": {"forward": ["a"]}}, "ManualPass: launch_at.forward must be "),
        ({"prefech": 2}, 'ManualPass takes no option "prefech"; did you mean "prefetch"?'),
    ],
    ids=str,
)
def test_options_of_our_pass_take_what_a_plan_may_have_there(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        ManualPass.of(**options)
    assert says in str(caught.value)


def test_options_of_our_pass_are_those_of_both_tables() -> None:
    made = ManualPass.of(cap_mb=(1, 0), prefetch=2, launch_at={"forward": {"b": "a"}})
    assert (made.bucket.cap_mb, made.overlap.prefetch, made.overlap.launch_at) == ((1, 0), 2, {"forward": {"b": "a"}})
