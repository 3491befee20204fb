"""What of a batch the model is called with, and what of it the loss gets.

The model gets what its forward takes: of a tuple the first items, by position, of a dict the keys, by name; ``*args`` and
``**kwargs`` take all. What is left are targets. ``[model] inputs`` says outright what the model gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.hints import some
from pytest_fxbucket.plan.inputs import Path

if TYPE_CHECKING:
    from torch import nn

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class Split:
    """Where in a batch the model's arguments lie."""

    arguments: tuple[Path, ...]
    """By position."""
    keywords: Mapping[str, Path]
    has_targets: bool
    """Whether anything of the batch is left."""
    hint: str = ""
    """What to write if this was not what the plan's author meant; empty if nothing else can be meant."""

    def call(self, model: Callable[..., Any], batch: Any) -> Any:
        """Call ``model``, or what wraps it, with its part of ``batch``."""
        given = [_at(batch, path) for path in self.arguments]
        return model(*given, **{name: _at(batch, path) for name, path in self.keywords.items()})

    def loss(self, function: Callable[[Any, Any], Any], output: Any, batch: Any) -> Any:
        """Call ``function`` with ``output`` and the targets; with all of ``batch`` if nothing is left, or if it says so."""
        return function(output, batch if not self.has_targets or _second(function) == "batch" else self.targets(batch))

    def targets(self, batch: Any) -> Any:
        """What is left of ``batch``: of a tuple the one item, or a tuple of several; of a dict a dict."""
        return _without(batch, [*self.arguments, *self.keywords.values()])


def split_of(model: nn.Module, batch: Any, inputs: Sequence[Path] = ()) -> Split:
    """How ``batch``, a tuple, list or dict, is split for ``model``; ``inputs`` as in ``[model] inputs``, empty if left out.

    Raises :class:`CaptureError` for a batch that can be meant in two ways, or of which forward takes nothing.
    """
    forward = _Forward.of(model)
    if inputs:
        return _as_asked(batch, inputs, forward)
    return _by_name(batch, forward) if isinstance(batch, dict) else _by_position(batch, forward)


@dataclass(frozen=True, slots=True)
class _Forward:
    """What the forward of a module takes; None: any."""

    name: str
    positions: tuple[str, ...] | None
    names: tuple[str, ...] | None
    required: int
    """How many of ``positions`` must be given."""

    @classmethod
    def of(cls, model: nn.Module) -> _Forward:
        name = f"{type(model).__name__}.forward"
        try:
            parameters = list(inspect.signature(model.forward).parameters.values())
        except (TypeError, ValueError):
            return cls(name, None, None, 0)
        kinds = [one.kind for one in parameters]
        positions = tuple(one.name for one in parameters if one.kind in _BY_POSITION)
        names = tuple(one.name for one in parameters if one.kind in _BY_NAME)
        required = sum(one.default is one.empty for one in parameters if one.kind in _BY_POSITION)
        return cls(
            name,
            None if inspect.Parameter.VAR_POSITIONAL in kinds else positions,
            None if inspect.Parameter.VAR_KEYWORD in kinds else names,
            required,
        )

    def opens(self, value: Any) -> bool:
        """Whether the items of ``value`` could be the arguments, one by one, instead of itself."""
        if isinstance(value, dict):
            return bool(value) and set(value) <= set(self.names or ()) and len(value) >= self.required
        return isinstance(value, (tuple, list)) and self.required <= len(value) <= len(self.positions or ())


def _by_name(batch: dict[str, Any], forward: _Forward) -> Split:
    taken = [key for key in batch if forward.names is None or key in forward.names]
    if batch and not taken:
        takes = some(forward.names or ("nothing",))
        raise CaptureError(
            f"[model] batch gave {some(list(map(str, batch)))}, and {forward.name} takes {takes}; "
            "name keys as it does, or return (batch,) to give it the dict itself"
        )
    return Split((), {key: (key,) for key in taken}, len(taken) < len(batch))


def _by_position(batch: Sequence[Any], forward: _Forward) -> Split:
    takes = len(batch) if forward.positions is None else min(len(batch), len(forward.positions))
    is_split = takes < len(batch)
    opens = len(batch) > 1 and forward.opens(batch[0])
    if opens and is_split:
        raise CaptureError(
            f"[model] batch gave {type(batch[0]).__name__} and {len(batch) - 1} more, and {forward.name} could take the first "
            'itself or what is in it; write inputs = [0] in [model] for the one, inputs = ["0.*"] for the other'
        )
    return Split(tuple((i,) for i in range(takes)), {}, is_split, _hint(batch, forward, opens) if not is_split else "")


def _hint(batch: Sequence[Any], forward: _Forward, opens: bool) -> str:
    """Of a batch that forward takes whole, though some of it may have been meant for the loss."""
    if opens:
        return '[model] inputs = ["0.*"] would give the model what is in the first item of the batch, and the loss the rest'
    if forward.positions is None or not 0 < forward.required < len(batch):
        return ""
    wanted = str(list(range(forward.required)))
    return (
        f"{forward.name} took all {len(batch)} items of the batch, as {some(forward.positions[: len(batch)])}; "
        f"[model] inputs = {wanted} would leave the rest to the loss, as targets"
    )


def _as_asked(batch: Any, inputs: Sequence[Path], forward: _Forward) -> Split:
    """By name what is in a dict, but for names that forward does not take: by position, as what is in a tuple."""
    arguments: list[Path] = []
    keywords: dict[str, Path] = {}
    for path in inputs:
        holder = _found(batch, path[:-1], path)
        children = _children(holder) if path[-1] == "*" else [path[-1]]
        for child in children:
            _found(holder, (child,), path)
            if not isinstance(holder, dict) or (forward.names is not None and child not in forward.names):
                arguments.append((*path[:-1], child))
            elif str(child) in keywords:
                raise CaptureError(f'[model] inputs gives "{child}" twice; a model takes a name once')
            else:
                keywords[str(child)] = (*path[:-1], child)
    every = [*arguments, *keywords.values()]
    return Split(tuple(arguments), keywords, _without(batch, every) is not _NOTHING)


def _found(value: Any, path: Path, asked: Path) -> Any:
    for step in path:
        if step not in (known := _children(value)):
            has = f"has {some(list(map(str, known)))}" if known else "has nothing in it"
            raise CaptureError(f'[model] inputs: "{".".join(map(str, asked))}" is not in the batch, which {has} there')
        value = value[step]
    return value


def _children(value: Any) -> list[str | int]:
    if isinstance(value, dict):
        return list(value)
    return list(range(len(value))) if isinstance(value, (tuple, list)) else []


def _at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


class _Nothing:
    """Nothing is left."""


_NOTHING = _Nothing()


def _without(value: Any, paths: Sequence[Path]) -> Any:
    if () in paths:
        return _NOTHING
    if not paths:
        return value
    left = {key: _without(value[key], [path[1:] for path in paths if path[0] == key]) for key in _children(value)}
    left = {key: item for key, item in left.items() if item is not _NOTHING}
    if not left:
        return _NOTHING
    if isinstance(value, dict):
        return left
    return next(iter(left.values())) if len(left) == 1 else tuple(left.values())


def _second(function: Callable[..., Any]) -> str:
    """Name of the second parameter of ``function``; empty if it cannot be told."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ""
    return names[1] if len(names) > 1 else ""
