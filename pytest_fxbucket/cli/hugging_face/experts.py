"""Parameters whose gradients may be zero: of experts that may get no token, and those that were seen to be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def may_be_idle(model: nn.Module, idle: Sequence[str]) -> tuple[str, ...]:
    """Entries for ``[model] may_be_idle``: lists of experts in ``model``, and ``idle``, parameters of its small size.

    An expert's weights may be parts of one parameter, which is never idle as a whole and is left out.
    """
    from torch import nn

    lists = [f"{fqn}.*" for fqn, module in model.named_modules() if _is_experts(fqn) and isinstance(module, nn.ModuleList)]
    known = {name for name, _ in model.named_parameters()}
    rest = [name for name in idle if name in known and not any(_holds(entry, name) for entry in lists)]
    return tuple(dict.fromkeys([*map(_each_layer, lists), *_together(rest, sorted(known))]))


def _is_experts(fqn: str) -> bool:
    return fqn.rpartition(".")[2] == "experts"


def _holds(entry: str, name: str) -> bool:
    return name.startswith(entry.removesuffix("*"))


def _each_layer(name: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def _together(idle: list[str], known: list[str]) -> list[str]:
    """Names of idle parameters; modules all of whose parameters are idle go by their own names."""
    found: list[str] = []
    for name in idle:
        stems = name.split(".")
        paths = [".".join(stems[:end]) for end in range(1, len(stems) + 1)]
        found.append(next(p for p in paths if all(one in idle for one in known if one == p or one.startswith(f"{p}."))))
    return list(dict.fromkeys(found))
