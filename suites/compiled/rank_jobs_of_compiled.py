"""Jobs that ranks run: compiled training with the pass and without."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from pytest_fxbucket.graph.collectives import read_launch
from pytest_fxbucket.passes import bucketing_backend, bucketing_post_grad_pass
from suites.compiled.small_nets import PLAN, loss_of, net, net_of_dtensors, words

CASES: dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "tied, a graph break": ({"tied": True, "breaks": "between"}, (["embed+head", "layers.*"],), {}),
    "bfloat16, kept": (
        {"param_dtype": torch.bfloat16, "reshard": False},
        (["embed", "layers.*", "head"],),
        {"gather_group": "own"},
    ),
    "scheduled": (
        {"param_dtype": torch.bfloat16, "depth": 2},
        (["embed", "layers.*", "head"],),
        {"schedule": "auto", "cluster": "h100-sxm"},
    ),
    "hidden": ({"tied": True, "depth": 2}, (), {"by": "overlap", "schedule": "auto", "cluster": "cpu-gloo"}),
    "by size": (
        {"tied": True, "breaks": "between", "param_dtype": torch.bfloat16},
        (),
        {"by": "size", "cap_mb": 0.00015},
    ),
}
"""How the net is sharded and broken, the plan, and options of the pass."""
WITHOUT_CODE = {"disable_cpp_codegen": True, "compile_threads": 1}
"""Inductor calls ATen's kernels in its own order and memory, and needs no compiler."""


def differing(rank: int, world: int, payload: Mapping[str, Any]) -> dict[str, list[str]]:
    """By case of ``payload["cases"]``: losses, gradients and parameters of two steps that the pass changes.

    ``payload["inductor"]``: inductor with and without the post-grad pass, else our backend beside the model as it is.
    """
    warnings.simplefilter("ignore")
    found = {}
    for case in payload["cases"]:
        sharding, args, options = CASES[case]
        ways: list[dict[str, Any]] = [{"disable": True}, {"backend": bucketing_backend(*args, **options)}]
        if payload["inductor"]:
            passes = bucketing_post_grad_pass(*args, **options).options
            ways = [{"options": WITHOUT_CODE}, {"options": {**WITHOUT_CODE, **passes}}]
        before, after = (_train(sharding, rank, world, compiling) for compiling in ways)
        found[case] = [name for name, value in before.items() if not torch.equal(value, after[name])]
        if all(not tensor.any() for tensor in after.values()):
            found[case].append("everything is zero")
    return found


def uneven(rank: int, world: int, width: int) -> dict[str, list[str]]:
    """Gradients of a net of DTensors, one block, that our backend changes, and the launches that it makes of both graphs.

    ``world`` does not divide the net's rows.
    """
    warnings.simplefilter("ignore")
    launches: list[str] = []

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        launches.extend(f"{read.operator} {read.node.meta['val'].shape}" for read in map(read_launch, gm.graph.nodes) if read)
        return make_boxed_func(gm.forward)

    backend = bucketing_backend(PLAN, compiler=compiler)
    before, after = (_gradients(rank, world, width, way) for way in ({"disable": True}, {"backend": backend}))
    said = [f"{report.launches_before} to {report.launches_after}" for report in backend.reports]
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    return {"changed": changed, "reports": said, "launches": launches}


def _gradients(rank: int, world: int, width: int, compiling: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of each parameter's rows on this rank."""
    torch._dynamo.reset()
    model = net_of_dtensors(world, width)
    loss_of(torch.compile(model, **compiling), words(rank=rank)).backward()
    return {name: p.grad.to_local() for name, p in model.named_parameters() if isinstance(p.grad, DTensor)}


def _train(sharding: Mapping[str, Any], rank: int, world: int, compiling: Mapping[str, Any]) -> dict[str, Tensor]:
    torch._dynamo.reset()
    model = net(world, **sharding)
    forward: Callable[..., Tensor] = torch.compile(model, **compiling)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen: dict[str, Tensor] = {}
    for step, batch in enumerate((3, 3)):
        optimizer.zero_grad()
        loss = loss_of(forward, words(step, batch, rank))
        loss.backward()
        seen |= {f"{step} {n}.grad": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        seen[f"{step} loss"] = loss.detach()
    return seen | {name: parameter.detach() for name, parameter in model.named_parameters()}
