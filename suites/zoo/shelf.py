"""Models of the zoo: how each is built, what it is fed, and the outcome that it must have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from suites.zoo.libraries import on_path, provide

if on_path():  # of whoever runs the zoo, and of its ranks; not of every process that imports a shelf
    provide()

Draw = Callable[[torch.Generator], Any]
"""Draws one batch: a tuple of positional or a dict of keyword inputs, of one shape each time."""
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class ZooModel:
    """One model. ``build``, ``batch`` and ``loss`` are what a plan names."""

    name: str
    library: str
    build: Callable[[], nn.Module]
    draw: Draw
    loss: Loss | None = None
    module: str = ""
    """Of the shelf that holds it."""
    plan: tuple[str, ...] | None = None
    """Entries; None: what ``fxbucket init`` would propose."""
    tables: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Further keys of the plan."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """By row ("fp32", "bf16", or "" for both) an expression that the refusing sentence matches."""
    rounds: str = ""
    """Why the traced step may round otherwise than plain eager."""
    as_traced: Callable[[], AbstractContextManager[None]] | None = None
    """In which eager takes the same ways as when it is traced, and then has the same bits."""
    near: bool = False
    """Whether eager has no such ways: gradients need be near eager's alone."""
    targets: bool = False
    """Whether a batch is (what the model takes, what the loss takes)."""

    def batch(self, rank: int, step: int) -> Any:
        """The batch of a rank and step."""
        return self.draw(torch.Generator().manual_seed(1_000_003 * step + rank))


class Shelf:
    """The models of one file, each an attribute, so that a plan can name ``module:SHELF.model.build``."""

    def __init__(self, library: str, module: str) -> None:
        self._library, self._module = library, module
        self._models: dict[str, ZooModel] = {}

    def add(self, name: str, build: Callable[[], nn.Module], draw: Draw, loss: Loss | None = None, **rest: Any) -> None:
        """Put a model on the shelf."""
        assert name not in self._models, name
        model = ZooModel(name, self._library, build, draw, loss, self._module, **rest)
        self._models[name] = model
        setattr(self, name, model)

    def __iter__(self) -> Iterator[ZooModel]:
        return iter(self._models.values())
