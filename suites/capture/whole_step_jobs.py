"""Runs in the ranks: whole steps, a captured graph's and eager torch's, with what they leave behind after each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from parity_jobs import rows_of
from torch import Tensor, nn

from fixtures.reference import by_torch
from fixtures.reference.stepping import backward, imported, local
from pytest_fxbucket.checks.bitwise.job import BitwiseTask
from pytest_fxbucket.step.mesh import make_groups
from pytest_fxbucket.step.portable import decode
from pytest_fxbucket.step_runner import KEPT, state_and_batches

Step = dict[str, dict[str, Tensor]]
"""By ``loss``, ``gradient``, ``parameter`` and ``state``, then by name; of this rank's own rows."""

ROLES = {"loss": "loss", "grad": "gradient", "param": "parameter", "state": "state"}


def graph_steps(rank: int, world: int, payload: Mapping[str, Any]) -> list[Step]:
    """Step the graph of ``task`` with a learning rate that ``decay`` shrinks after each step."""
    task: BitwiseTask = payload["task"]
    make_groups(task.mesh, rank)
    graph = decode(task.unbucketed)
    state, batches = state_and_batches(rank, task)
    kept = [(value.role, value.fqn) for value in task.inputs if value.role in KEPT]
    now = dict(zip(kept, state, strict=True))
    steps = []
    for number in range(task.steps):
        made = graph(*(now[key] for key in kept), *batches(number))
        results = {(v.role, v.fqn): result for v, result in zip(task.outputs, made, strict=True)}
        now.update({key: value for key, value in results.items() if key in now})
        now.update({key: value * payload["decay"] for key, value in now.items() if key[0] == "hyper"})
        by_role = {what: {fqn: value for (of, fqn), value in results.items() if of == role} for role, what in ROLES.items()}
        steps.append({what: dict(_own(found, rank, task)) for what, found in by_role.items()})
    return steps


def _own(found: Mapping[str, Tensor], rank: int, task: BitwiseTask) -> Iterator[tuple[str, Tensor]]:
    """Without what pads: rows of parameters, and of state that has the shape of its parameter."""
    described = {parameter.fqn: parameter for parameter in task.parameters}
    for name, value in found.items():
        owner = described.get(name) or described.get(name.rpartition(".")[0])
        is_whole = owner is None or not value.dim()
        yield name, (value if is_whole else value[: rows_of(rank, task.mesh, owner)]).clone()  # type: ignore[arg-type]


def eager_steps(rank: int, world: int, payload: Mapping[str, Any]) -> list[Step]:
    """The same by torch: ``wrapped`` is ``fsdp2`` or ``ddp`` of by_torch, whose keys ``payload`` has.

    ``optimizers`` are (factory, arguments, [(FQNs, arguments of the group)]); ``clip_norm`` as ``clip_grad_norm_`` takes it.
    """
    model, call = getattr(by_torch, payload["wrapped"])(payload)
    named = dict(model.named_parameters())
    optimizers = [
        factory([{"params": [named[fqn] for fqn in fqns], **more} for fqns, more in groups], **args)
        for factory, args, groups in ((imported(f), a, g) for f, a, g in payload["optimizers"])
    ]
    steps: list[Step] = []
    for number in range(payload["steps"]):
        loss = backward(imported(payload["batch"])(payload["data_rank"][rank], number), payload, call)
        gradients = {fqn: local(p.grad).clone() for fqn, p in named.items() if p.grad is not None}
        if payload["clip_norm"]:
            nn.utils.clip_grad_norm_(model.parameters(), payload["clip_norm"])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= payload["decay"]
        held = {fqn: _state_of(optimizers, parameter) for fqn, parameter in named.items()}
        steps.append(
            {
                "loss": {"": loss},
                "gradient": gradients,
                "parameter": {fqn: local(parameter).clone() for fqn, parameter in named.items() if fqn in gradients},
                "state": {f"{fqn}.{key}": local(value).clone() for fqn, of in held.items() for key, value in of.items()},
            }
        )
    return steps


def _state_of(optimizers: Sequence[torch.optim.Optimizer], parameter: Tensor) -> dict[str, Tensor]:
    owner = next((one for one in optimizers if parameter in one.state), None)
    return {} if owner is None else {key: value for key, value in owner.state[parameter].items() if isinstance(value, Tensor)}
