"""Sub-graphs for the modules of override_models, right and wrong ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pytest_fxbucket.capture import Subgraph
from suites.capture.override_models import WIDTH, Attends, Chooses, Holds

ASKED: list[str] = []
"""Classes of the modules that `counting` was asked for."""


def attended(module: Attends, x: Tensor, pair: Any, *, mask: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """What :class:`Attends` gives, of fake tensors."""
    rows = x.shape[0]
    best = torch.empty(rows, dtype=torch.int64)
    return {"mixed": x.new_empty(rows, WIDTH), "best": best, "rest": [x.new_empty(rows, rows), None, options["name"]]}


def counting(module: Chooses, start: int = 0) -> Subgraph:
    """Every row takes both linears, weighted; how many rows were high is counted."""
    ASKED.append(type(module).__name__)

    def forward(tensors: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        high = x.sum(1, keepdim=True) >= 0
        low = functional.linear(x, tensors["low.weight"], tensors["low.bias"])
        out = torch.where(high, functional.linear(x, tensors["high.weight"], tensors["high.bias"]), low)
        return out * (1 + 0.01 * tensors["rows"]), {"rows": tensors["rows"] + high.sum()}

    return Subgraph(forward, {"rows": torch.tensor(start)})


def low_alone(module: Chooses) -> Any:
    """A sub-graph that reads one of the two linears."""
    return lambda tensors, x: functional.linear(x, tensors["low.weight"], tensors["low.bias"]).tanh()


def nothing(module: nn.Module) -> None:
    """Gives no sub-graph."""


def a_number(module: nn.Module) -> Any:
    return 3


def fake_state(module: Chooses) -> Subgraph:
    return Subgraph(lambda tensors, x: (x, {"mean": tensors["mean"]}), {"mean": module.low.weight.mean()})


def taken_state(module: Chooses) -> Subgraph:
    return Subgraph(lambda tensors, x: (x, {}), {"low": torch.zeros(1)})


def forgets_state(module: Chooses) -> Subgraph:
    return Subgraph(lambda tensors, x: (x, {}), {"rows": torch.zeros(1)})


def grows_state(module: Chooses) -> Subgraph:
    return Subgraph(lambda tensors, x: (x, {"rows": torch.zeros(2)}), {"rows": torch.zeros(1)})


def no_pair(module: Chooses) -> Subgraph:
    return Subgraph(lambda tensors, x: x, {"rows": torch.zeros(1)})


def reads_unknown(module: Chooses) -> Any:
    return lambda tensors, x: x @ tensors["low.weigth"]


def reads_module(module: Chooses) -> Any:
    return lambda tensors, x: x @ module.low.weight


def writes_state(module: Chooses) -> Any:
    def forward(tensors: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {"rows": tensors["rows"].add_(1)}

    return Subgraph(forward, {"rows": torch.zeros(1)})


def asks_values(module: Chooses) -> Any:
    return lambda tensors, x: x * 2 if x.sum() > 0 else x


def raises_in_subgraph(module: Chooses) -> Any:
    def forward(tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        raise ZeroDivisionError("by zero")  # the line that the sentence must name

    return forward


def draws(module: Chooses) -> Any:
    return lambda tensors, x: functional.dropout(functional.linear(x, tensors["low.weight"]), 0.5)


def holds_low_alone(kind: str = "Chooses") -> nn.Module:
    """By eager what :func:`low_alone` has in a graph."""
    model = Holds(Chooses())
    held = model.held
    model.held.forward = lambda x: low_alone(held)(dict(held.named_parameters()), x)
    return model
