"""An ``[optimizer]`` table says which parameters an optimizer has, and in which groups; a slip is one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from pytest_fxbucket.capture.optimizers.optimizer import build_optimizers
from pytest_fxbucket.capture.optimizers.update import trace_update
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.selectors import Entry, ResolvedEntry, parse_entries
from suites.capture.optimizer_steps import values

FQNS = ["embed.weight", "layers.0.w", "layers.0.norm.weight", "layers.1.w", "layers.1.norm.weight", "out.bias"]


@dataclass(frozen=True)
class Table:
    factory: str = "torch.optim:AdamW"
    args: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.01})
    params: tuple[Entry, ...] = ()
    groups: str | tuple[Mapping[str, object], ...] = "one"


def chosen(selectors: list[str]) -> tuple[Entry, ...]:
    return parse_entries(selectors, "params")


def table(*selectors: str, **more: Any) -> Table:
    return Table(params=parse_entries(list(selectors), "params"), **more)


def parameters():
    return {fqn: torch.zeros(3) for fqn in FQNS}


def built(*tables, entries=()):
    """FQNs of each group of each optimizer."""
    held = parameters()
    names = {id(tensor): fqn for fqn, tensor in held.items()}
    optimizers = build_optimizers(tables, held, entries)
    return [[[names[id(p)] for p in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers]


def test_one_optimizer_has_all_in_one_group():
    assert built(Table()) == [[FQNS]]


def test_an_optimizer_without_params_has_what_the_others_leave():
    assert built(table("layers.[0-1].w"), Table(factory="torch.optim:SGD")) == [
        [["layers.0.w", "layers.1.w"]],
        [["embed.weight", "layers.0.norm.weight", "layers.1.norm.weight", "out.bias"]],
    ]


def test_a_group_for_each_entry_stands_in_the_plans_order_and_the_rest_is_last():
    entries = [ResolvedEntry("layers.1", ("layers.1.w", "layers.1.norm.weight")), ResolvedEntry("layers.0", ("layers.0.w",))]
    assert built(Table(groups="entry"), entries=entries) == [
        [["layers.1.w", "layers.1.norm.weight"], ["layers.0.w"], ["embed.weight", "layers.0.norm.weight", "out.bias"]]
    ]


def test_listed_groups_have_their_own_options_and_one_may_have_the_rest():
    groups = ({"params": chosen(["layers.*.norm", "out.bias"]), "weight_decay": 0.0}, {"lr": 0.5})
    held = parameters()
    (optimizer,) = build_optimizers([Table(groups=groups)], held)
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == [(0.01, 0.0, 3), (0.5, 0.01, 3)]


def test_a_tied_parameter_is_found_by_its_other_name():
    @dataclass
    class Model:
        modules = ("", "embed", "out", "layers", "layers.0", "layers.0.norm", "layers.1", "layers.1.norm")
        names = {**{fqn: fqn for fqn in FQNS}, "out.weight": "embed.weight"}  # noqa: RUF012

    held = parameters()
    first, _ = build_optimizers([table("out.weight"), Table()], held, names=Model())
    assert first.param_groups[0]["params"][0] is held["embed.weight"]


def test_each_entrys_update_depends_on_its_own_gradients_alone():
    entries = [ResolvedEntry(fqn, (fqn,)) for fqn in FQNS]
    spec = Table(args={"lr": 0.01, "fused": True}, groups="entry")
    update = trace_update(lambda held: build_optimizers([spec], held, entries), values(parameters()), FQNS)
    graph = update.graph_module.graph
    fused = [node for node in graph.nodes if "_fused_adamw" in str(node.target)]
    grads = [n for n, v in zip(graph.find_nodes(op="placeholder"), update.inputs, strict=True) if v.role == "grad"]
    assert [[grad for grad in grads if grad in node.all_input_nodes] for node in fused] == [[grad] for grad in grads]


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ([table("layers.2")], '[optimizer] params: entry "layers.2" matches no'),
        ([table("layers.0.w"), table("layers.*.w")], "[[optimizer]] 1 and [[optimizer]] 2 both have the parameter layers.0.w"),
        ([table("layers")], "no [[optimizer]] has the trainable parameter embed.weight"),
        ([Table(), Table()], "[[optimizer]] 1 and [[optimizer]] 2 both name no params"),
        ([table("embed", "layers", "out"), Table()], "[[optimizer]] 2 has no parameter left"),
        ([Table(groups=({"params": chosen(["layers.7"])}, {}))], '[optimizer] groups 1 params: entry "layers.7" matches no'),
        (
            [Table(groups=({"params": chosen(["layers"])},))],
            "[optimizer] groups leave out the parameter embed.weight; add it to one, or add a group without params, `{}`, "
            "which has the rest",
        ),
        (
            [Table(groups=({"params": chosen(["layers"]), "weight_deacy": 0.0}, {}))],
            '[optimizer] groups 1 has no option "weight_deacy"; did you mean "weight_decay"?',
        ),
        (
            [Table(factory="torch.optim:SGD", groups=({"params": chosen(["layers"])}, {"qq": 0.0}))],
            '[optimizer] groups 2 has no option "qq"; known are lr, momentum, dampening, weight_decay',
        ),
        ([Table(groups=({}, {}))], "[optimizer] groups 1 and [optimizer] groups 2 both name no params"),
        (
            [Table(groups=({"params": chosen(["layers"])}, {"params": chosen(["layers.0.w"])}, {}))],
            "groups 2 both have the parameter layers.0.w",
        ),
        ([Table(groups=({"params": chosen(["embed", "layers", "out"])}, {}))], "[optimizer] groups 2 has no parameter left"),
        ([Table(groups="layer")], '[optimizer] groups is "layer", expected "one", "entry" or a list of tables'),
        ([Table(factory="torch.optim:AdamV")], '[optimizer] factory: module "torch.optim" has no "AdamV"; did you mean "Adam'),
        ([Table(args={"speed": 1})], "[optimizer] factory torch.optim:AdamW raised TypeError: "),
        ([Table(factory="builtins:list", args={})], "gave a value of type list, expected an Optimizer"),
        ([Table(factory="torch.optim:LBFGS")], "torch.optim:LBFGS runs the step's closure again and again"),
        ([Table(factory="torch.optim:SparseAdam")], "torch.optim:SparseAdam takes sparse gradients"),
        ([Table(args={"lr": 0.1, "capturable": True})], "[optimizer] sets capturable, but"),
        (
            [Table("torch.optim:SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5})],
            "[optimizer] sets dampening, with which SGD takes its first gradient whole",
        ),
    ],
)
def test_a_slip_is_one_sentence(tables, said):
    with pytest.raises(PlanError) as raised:
        built(*tables)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
