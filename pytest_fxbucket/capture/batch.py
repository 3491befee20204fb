"""A batch: what of it the model and the loss get, in how many parts, and what is a loss.

The model gets what its forward takes: of a tuple the first items, by position, of a dict the keys, by name; ``*args`` and
``**kwargs`` take all. What is left are targets. ``[model] inputs`` says outright what the model gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.table_rules import Path
from pytest_fxbucket.words import some

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


def microbatches(leaves: Sequence[Any], count: int) -> Iterator[list[Any]]:
    """``count`` lists like ``leaves``, each with its rows of every tensor; what is no tensor is in all of them.

    Raises :class:`CaptureError` for a tensor that cannot be cut so.
    """
    if count == 1:
        yield list(leaves)
        return
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or leaf.shape[0] % count):
            raise CaptureError(
                f"[step] microbatches = {count} does not divide dimension 0 of a tensor of the batch, "
                f"whose shape is {tuple(leaf.shape)}; use a number that does, or give the batch more rows"
            )
    for number in range(count):
        yield [_rows(leaf, number, count) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _rows(tensor: torch.Tensor, number: int, count: int) -> torch.Tensor:
    rows = tensor.shape[0] // count
    return tensor.narrow(0, number * rows, rows)


# The loss of a step: the plan's own or the model's, and what is no loss.


def own_loss(output: Any, batch: Any) -> Any:
    """The loss of a plan that names none: ``loss`` in what the model gives, the one scalar of a tuple, or the output itself."""
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if hasattr(output, "loss"):
        return output.loss
    if isinstance(output, (tuple, list)) and len(scalars := _scalars(output)) == 1:
        return scalars[0]
    return output


def _scalars(output: Sequence[Any]) -> list[torch.Tensor]:
    """Tensors without dimensions that have a gradient."""
    return [item for item in output if isinstance(item, torch.Tensor) and item.dim() == 0 and item.requires_grad]


def refuse_unread(function: Callable[[Any, Any], Any], split: Split, batch: Any) -> None:
    """Raise :class:`CaptureError` for a ``batch`` of which the model leaves something, and a plan without a loss to read it."""
    if function is own_loss and split.has_targets:
        left = split.targets(batch)
        what = f"{some(list(map(str, left)))} of the batch" if isinstance(left, dict) else "a part of the batch"
        raise CaptureError(
            f"the model does not take {what}, and there is no [model] loss to read it; name a callable(output, targets), "
            "or leave it out of the batch"
        )


def refuse_other_loss(function: Callable[[Any, Any], Any], output: Any, loss: Any) -> None:
    """A loss is a scalar tensor that depends on a trainable parameter; ``function`` made it of ``output``."""
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise CaptureError(_no_scalar(function, output, loss))
    if not loss.requires_grad:
        raise CaptureError("the loss does not depend on any trainable parameter, so there is no step to check")


def _no_scalar(function: Callable[[Any, Any], Any], output: Any, loss: Any) -> str:
    is_tensor = isinstance(loss, torch.Tensor)
    what = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else f"a value of type {type(loss).__name__}"
    if function is own_loss:
        return _no_own_loss(output, loss, what)
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__)
    use = "take its mean() or sum()" if is_tensor else "return a tensor without dimensions"
    return f"the loss must be a scalar tensor, but [model] loss {module}:{name} gave {what}; {use}"


def _no_own_loss(output: Any, loss: Any, what: str) -> str:
    if loss is None:
        return "the model's output.loss is None; give the batch what it makes a loss of, as labels, or name a [model] loss"
    if loss is not output:
        return f"the model's output.loss is {what}; name a [model] loss that makes a scalar of it"
    if isinstance(output, Mapping):
        what = f"a {type(output).__name__} of {some(list(map(str, output)))}, and no loss in it"
    elif isinstance(output, (tuple, list)):
        what = f"a {type(output).__name__} of {len(output)}, of which {len(_scalars(output))} are losses"
    return f"the model's output is {what}; name a [model] loss that makes a scalar of it"
