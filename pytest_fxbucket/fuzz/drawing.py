"""A legal graph of collectives under construction, with the values that the next step may read, write or wait for.

Legal: all ranks run the same; a result is read behind its wait; what a launch sends is not written, and what it fills not
touched, before its wait; every launch is waited for. Values are small integers, or thirds and quarters of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.fuzz.program import HALVES, Program

MOST = 4096
"""Elements that a value has at most."""
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


@dataclass(frozen=True)
class DrawingStep:
    """What is done next; ``a``, ``b`` and ``c`` choose among the values that there are by then."""

    what: str
    a: int = 0
    b: int = 0
    c: int = 0


@dataclass(frozen=True)
class ReadableValue:
    """A value that a step may read."""

    node: fx.Node
    storage: int
    plain: bool
    """Whether it is an input, at most moved, cast or gathered since: what a parameter is."""

    @property
    def fake(self) -> torch.Tensor:
        """Its fake value."""
        value: torch.Tensor = self.node.meta["val"]
        return value

    @property
    def is_one_to_one(self) -> bool:
        """Whether each element lies in a place of its own."""
        return all(size < 2 or stride for size, stride in zip(self.fake.shape, self.fake.stride(), strict=True))

    @property
    def rows(self) -> int:
        """Number of rows; of a symbolic size the one that it was traced with."""
        size: Any = self.fake.shape[0]
        return size if isinstance(size, int) else int(size.node.hint)

    def is_like(self, other: ReadableValue) -> bool:
        """Whether both have one shape and dtype."""
        return self.fake.shape == other.fake.shape and self.fake.dtype == other.fake.dtype


@dataclass(frozen=True)
class LaunchedTensor:
    """One tensor of a launch."""

    node: fx.Node
    storage: int
    plain: bool
    sends: int
    """Storage that is sent."""
    fills: bool
    """Whether ``storage`` was there before, and belongs to the launch until the wait."""


@dataclass
class DrawnParameter:
    """A parameter, and the state that its update has."""

    fqn: str
    module: str
    """Its module, as the program names it."""
    shard: fx.Node
    gathered: fx.Node
    momentum: fx.Node
    reduced: Callable[[fx.Node], fx.Node]
    """Reduces its gradient, which is of the shape of ``gathered``."""
    gradient: fx.Node | None = None
    updated: bool = False


@dataclass
class Drawing:
    """A program under construction."""

    world: int
    inside: str = ""
    """What the names of all modules begin with."""
    program: Program = field(init=False)
    values: list[ReadableValue] = field(default_factory=list)
    open: list[LaunchedTensor] = field(default_factory=list)
    waited: list[LaunchedTensor] = field(default_factory=list)
    symbolic: list[ReadableValue] = field(default_factory=list)
    """Values of symbolic size. Only few steps read them: to compare the size with a number would specialise it."""
    returned: list[fx.Node] = field(default_factory=list)
    drawn_parameters: list[DrawnParameter] = field(default_factory=list)
    """Parameters of a whole step, which is called over and over."""
    results: list[tuple[fx.Node, str]] = field(default_factory=list)
    """What else a whole step returns, with its roles: gradients, new parameters and state."""
    modules: list[str] = field(default_factory=list)
    """Module of each launch."""
    storages: int = 0

    def __post_init__(self) -> None:
        everybody = list(range(self.world))
        groups = {"again": [everybody], "alone": [[rank] for rank in everybody], **HALVES.get(self.world, {})}
        self.program = Program(self.world, groups)
        self.program.module = f"{self.inside}a"
        self.groups = [*sorted(groups), *["0"] * 6]  # most launches are on the world
        w = self.world
        # What is plainest comes last, since that is what small numbers choose.
        for i, dtype in enumerate(DTYPES[:0:-1]):
            self.add(self.program.given(f"q{i}", 2 * w, 3, dtype=dtype), plain=True)
        # Two shapes come twice: to add, copy or swap takes two values that are alike.
        shapes: list[tuple[int, ...]] = [(), (0, 3), (2 * w * w, 3), (3,), (1, 5), (2, 3), (2, 3), (2 * w, 3), (2 * w, 3)]
        for i, shape in enumerate(shapes):
            self.add(self.program.given(f"p{i}", *shape), plain=True)

    def add(self, node: fx.Node, *, storage: int | None = None, plain: bool = False) -> ReadableValue:
        """``node`` as a value that steps may read; without ``storage`` in one of its own."""
        drawn = ReadableValue(node, self.new_storage() if storage is None else storage, plain)
        is_symbolic = any(not isinstance(size, int) for size in drawn.fake.shape)
        (self.symbolic if is_symbolic else self.values).append(drawn)
        return drawn

    def new_storage(self) -> int:
        """A number that no storage has yet."""
        self.storages += 1
        return self.storages

    def readable(self, allowed: Callable[[ReadableValue], bool] = lambda _: True) -> list[ReadableValue]:
        """What a step may read now."""
        filled = {one.storage for one in self.open if one.fills}
        return [value for value in self.values if value.storage not in filled and allowed(value)]

    def writable(self, allowed: Callable[[ReadableValue], bool] = lambda _: True) -> list[ReadableValue]:
        """What a step may write now."""
        # Neither what a launch in flight sends nor, by readable, what it fills; nor a value whose elements share memory.
        sent = {one.sends for one in self.open}
        return [value for value in self.readable(allowed) if value.storage not in sent and value.is_one_to_one]

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """As :meth:`Program.call`, of values too."""
        plain = [arg.node if isinstance(arg, ReadableValue) else arg for arg in args]
        return self.program.call(target, *plain, **kwargs)

    def fly(self, made: Sequence[fx.Node], sent: Sequence[ReadableValue], plain: bool, fills: int | None = None) -> None:
        """``made`` are the parts of a launch that sends ``sent``; they are new, or ``fills`` is the storage that they fill."""
        self.modules.append(self.program.module or "")
        for node, value in zip(made, sent, strict=True):
            storage = self.new_storage() if fills is None else fills
            self.open.append(LaunchedTensor(node, storage, plain, value.storage, fills is not None))

    def wait(self, number: int = 0) -> None:
        """Wait for one that is in flight, counted from the last."""
        one = pick(self.open, number)
        if one is not None:
            self.open.remove(one)
            self.waited.append(one)
            self.add(self.program.wait(one.node), storage=one.storage, plain=one.plain)

    def finish(self) -> fx.GraphModule:
        """Wait for all that is in flight; the outputs are the values that steps chose, and computed ones that nobody read."""
        while self.open:
            self.wait()
        everything = [*self.values, *self.symbolic]
        unread = [value.node for value in everything if not value.node.users and value.node.op == "call_function"]
        outputs = [*self.returned, *(node for node in unread if node not in self.returned)]
        if not self.drawn_parameters:
            return self.program.returns(*outputs)
        roles = [f"loss {number}" for number in range(len(outputs))]
        return self.program.returns(
            *outputs, *(node for node, _ in self.results), roles=[*roles, *(role for _, role in self.results)]
        )


def pick(values: Sequence[Any], number: int) -> Any:
    """The one of ``values`` that ``number`` means, counted from the last; None if there is none."""
    # hypothesis makes numbers small, and 0 then is what was made right before.
    return values[-1 - number % len(values)] if values else None
