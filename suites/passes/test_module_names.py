"""Entries match modules however the model was traced: any variable, any wrapper, any spelling of torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd

from pytest_fxbucket.compat.c10d import fake_world
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.graph.collectives import launch_kind
from pytest_fxbucket.passes import manual_overlap_bucketing
from pytest_fxbucket.passes.module_names import entries_by_module, module_path
from suites.graph.view_models import Wrapper, checkpointed, dynamo
from suites.passes.programs import chain

WIDTH = 4


class Gathered(nn.Module):
    """A linear layer that gathers its weight where it reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH // 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = funcol.all_gather_tensor(self.weight, 0, [0, 1])
        return x @ weight


class Net(nn.Module):
    """Its forward's first argument is not called ``self``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Gathered()
        self.layers = nn.ModuleList(nn.Sequential(Gathered(), Gathered()) for _ in range(2))

    def forward(this, x: Tensor) -> Tensor:
        x = this.embed(x)
        for layer in this.layers:
            x = layer(x)
        return x


def captured(function: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """The graph that dynamo and AOTAutograd make of ``function``."""

    def autograd(keep: Callable[..., Any]) -> Any:
        return aot_autograd(fw_compiler=lambda gm, inputs: make_boxed_func(keep(gm, inputs)))

    with torch.no_grad():
        return dynamo(function, *args, behind=autograd)


CAPTURES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "a compiled model within": lambda: (Wrapper(torch.compile(Net())),),
    "an item of a list, with a layer that is checkpointed": lambda: (
        lambda models, x: models[0](x),
        [Wrapper(checkpointed(Net()))],
    ),
}


@pytest.mark.parametrize("case", CAPTURES)
def test_the_same_entries_match_however_dynamo_met_the_model(case: str) -> None:
    with fake_world(0, 2):
        gm = captured(*CAPTURES[case](), torch.ones(WIDTH, WIDTH))
    found = entries_by_module(gm.graph, [("embed", ["embed"]), ("layers.*", ["layers.*"])])
    assert found.entries == ("embed", "layers.0", "layers.1")
    launches = [node for node in gm.graph.nodes if launch_kind(node)]
    assert [found.entry_of[node] for node in launches] == ["embed", "layers.0", "layers.0", "layers.1", "layers.1"]


@pytest.mark.parametrize(
    ("spelled", "path"),
    [
        ("layers.0.wq", "layers.0.wq"),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("L['self']._modules['layers']['0'].wq", "layers.0.wq"),
        ("L['self'].layers[0].wq", "layers.0.wq"),
        ("L['anything'].layers.0", "layers.0"),
        ("G['net'].layers.0", "layers.0"),
        ("L['self'].layers.0.__dict__['_modules']['_checkpoint_wrapped_module'].wq", "layers.0.wq"),
        ("_orig_mod.layers.0._fsdp_wrapped_module.wq", "layers.0.wq"),
        ("L['self']._modules['a-b']", "a-b"),
        ("L['self']", ""),
        ("", ""),
    ],
)
def test_every_spelling_of_a_module_is_its_fqn(spelled: str, path: str) -> None:
    assert ".".join(module_path(spelled)) == path


def test_a_prefix_that_all_share_is_taken_off_for_all_entries_or_none() -> None:
    gm = chain(["model.embed", "model.layers.0", "model.layers.1"])
    manual_overlap_bucketing(gm, ["embed", "layers.[0-1]"])
    assert sum(launch_kind(node) is not None for node in gm.graph.nodes) == 3
    for mixed in (["model.embed", "layers.0"], ["layers.0", "model.embed"]):
        with pytest.raises(PlanError, match="exists, so write it with"):
            manual_overlap_bucketing(chain(["model.embed", "model.layers.0"]), mixed)


def test_a_prefix_that_one_launch_lacks_is_not_guessed() -> None:
    gm = chain(["encoder.layers.0", "decoder.layers.0"])
    with pytest.raises(PlanError, match=r'"decoder.layers.0" exists, so write it with "decoder." before it'):
        manual_overlap_bucketing(gm, ["layers.0"])


def test_an_entry_that_matches_as_it_is_written_is_not_read_behind_a_prefix() -> None:
    gm = chain(["layers.0", "layers.0.layers.0"])
    found = entries_by_module(gm.graph, [("layers.0", ["layers.0"])])
    assert len(found.entry_of) == 4


def test_an_entry_may_name_the_wrapper_that_torch_puts_in() -> None:
    gm = chain(["layers.0._checkpoint_wrapped_module.wq", "embed"])
    for name in ("layers.0.wq", "_orig_mod.layers.0._checkpoint_wrapped_module.wq", "layers.0"):
        assert len(entries_by_module(gm.graph, [(name, [name])]).entry_of) == 2


def test_a_module_called_within_another_belongs_to_its_own_entry_and_else_to_the_caller_s() -> None:
    gm = chain(["a", "shared"])
    for node in gm.graph.nodes:
        stack = node.meta.get("nn_module_stack", {})
        if "shared" in stack:
            node.meta["nn_module_stack"] = {"": ("", nn.Module), "a": ("a", nn.Module), "shared": ("shared", nn.Module)}
    own = entries_by_module(gm.graph, [("a", ["a"]), ("shared", ["shared"])])
    assert sorted(own.entry_of.values()) == ["a", "a", "shared", "shared"]
    assert list(entries_by_module(gm.graph, [("a", ["a"])]).entry_of.values()) == ["a"] * 4


def test_a_number_is_no_prefix_of_a_longer_one() -> None:
    gm = chain([f"layers.{i}" for i in range(11)])
    assert list(entries_by_module(gm.graph, [("layers.1", ["layers.1"])]).entry_of.values()) == ["layers.1"] * 2


def test_an_annotation_names_a_launch_as_a_stack_does() -> None:
    gm = chain(["layers.0", "layers.1"])
    for node in gm.graph.nodes:
        if stack := node.meta.pop("nn_module_stack", None):
            node.meta["custom"] = {"module_fqn": [*stack][-1]}
    found = entries_by_module(gm.graph, [("layers.*", ["layers.*"])])
    assert list(found.entry_of.values()) == ["layers.0"] * 2 + ["layers.1"] * 2
