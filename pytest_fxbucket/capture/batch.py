"""The batch that a step is traced with: its split between model and loss, its microbatches; and the loss of a step.

The model gets what its forward takes: of a tuple the first items, by position, of a dict the keys, by name; ``*args`` and
``**kwargs`` take all. What is left are targets. ``[model] inputs`` says outright what the model gets. One graph serves every
rank and step, so other batches may differ in values alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture.parallel.context_parallel import cut_sequences
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.table_rules import Path
from pytest_fxbucket.step.mesh import Mesh
from pytest_fxbucket.step.roles import Value
from pytest_fxbucket.user_frame import naming_user_frame
from pytest_fxbucket.words import some

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True)
class BatchSplit:
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
        try:
            second = list(inspect.signature(function).parameters)[1:2]
        except (TypeError, ValueError):
            second = []
        return function(output, batch if not self.has_targets or second == ["batch"] else self.targets(batch))

    def targets(self, batch: Any) -> Any:
        """What is left of ``batch``: of a tuple the one item, or a tuple of several; of a dict a dict."""
        return _without(batch, [*self.arguments, *self.keywords.values()])


def split_of(model: nn.Module, batch: Any, inputs: Sequence[Path] = ()) -> BatchSplit:
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


def _by_name(batch: dict[str, Any], forward: _Forward) -> BatchSplit:
    taken = [key for key in batch if forward.names is None or key in forward.names]
    if batch and not taken:
        takes = some(forward.names or ("nothing",))
        raise CaptureError(
            f"[model] batch gave {some(list(map(str, batch)))}, and {forward.name} takes {takes}; "
            "name keys as it does, or return (batch,) to give it the dict itself"
        )
    return BatchSplit((), {key: (key,) for key in taken}, len(taken) < len(batch))


def _by_position(batch: Sequence[Any], forward: _Forward) -> BatchSplit:
    takes = len(batch) if forward.positions is None else min(len(batch), len(forward.positions))
    is_split = takes < len(batch)
    # A batch such as ((tokens, mask), labels): forward could take the first item itself, or the items in it.
    opens = len(batch) > 1 and forward.opens(batch[0])
    if opens and is_split:
        raise CaptureError(
            f"[model] batch gave {type(batch[0]).__name__} and {len(batch) - 1} more, and {forward.name} could take the first "
            'itself or what is in it; write inputs = [0] in [model] for the one, inputs = ["0.*"] for the other'
        )
    return BatchSplit(tuple((i,) for i in range(takes)), {}, is_split, _hint(batch, forward, opens) if not is_split else "")


def _hint(batch: Sequence[Any], forward: _Forward, opens: bool) -> str:
    """What to write if forward takes all of ``batch``, but some of it was meant for the loss; empty if it cannot be so."""
    if opens:
        return '[model] inputs = ["0.*"] would give the model what is in the first item of the batch, and the loss the rest'
    if forward.positions is None or not 0 < forward.required < len(batch):
        return ""
    wanted = str(list(range(forward.required)))
    return (
        f"{forward.name} took all {len(batch)} items of the batch, as {some(forward.positions[: len(batch)])}; "
        f"[model] inputs = {wanted} would leave the rest to the loss, as targets"
    )


def _as_asked(batch: Any, inputs: Sequence[Path], forward: _Forward) -> BatchSplit:
    """Give items of a dict by name, if forward takes the name; all others by position, as items of a tuple."""
    arguments: list[Path] = []
    keywords: dict[str, Path] = {}
    for path in inputs:
        holder = _value_at(batch, path[:-1], path)
        children = _children(holder) if path[-1] == "*" else [path[-1]]
        for child in children:
            _value_at(holder, (child,), path)
            if not isinstance(holder, dict) or (forward.names is not None and child not in forward.names):
                arguments.append((*path[:-1], child))
            elif str(child) in keywords:
                raise CaptureError(f'[model] inputs gives "{child}" twice; a model takes a name once')
            else:
                keywords[str(child)] = (*path[:-1], child)
    every = [*arguments, *keywords.values()]
    return BatchSplit(tuple(arguments), keywords, _without(batch, every) is not _NOTHING)


def _value_at(value: Any, path: Path, asked: Path) -> Any:
    """The value at ``path``, the first part of the path ``asked`` for. Raises :class:`CaptureError` if there is none."""
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


_NOTHING: Any = object()
"""Stands for a value of which nothing is left."""


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


def microbatches(leaves: Sequence[Any], count: int) -> Iterator[list[Any]]:
    """``count`` lists like ``leaves``: each tensor is cut on dimension 0, and all that is no tensor is in every list.

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
        yield [
            leaf.narrow(0, number * (leaf.shape[0] // count), leaf.shape[0] // count)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]


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


def refuse_unread(function: Callable[[Any, Any], Any], split: BatchSplit, batch: Any) -> None:
    """Raise :class:`CaptureError` if the model leaves something of ``batch``, and the plan names no loss to read it."""
    if function is own_loss and split.has_targets:
        left = split.targets(batch)
        what = f"{some(list(map(str, left)))} of the batch" if isinstance(left, dict) else "a part of the batch"
        raise CaptureError(
            f"the model does not take {what}, and there is no [model] loss to read it; name a callable(output, targets), "
            "or leave it out of the batch"
        )


def refuse_other_loss(function: Callable[[Any, Any], Any], output: Any, loss: Any) -> None:
    """A loss is a scalar tensor that depends on a trainable parameter; ``function`` made it of ``output``."""
    is_tensor = isinstance(loss, torch.Tensor)
    if is_tensor and loss.dim() == 0:
        if not loss.requires_grad:
            raise CaptureError("the loss does not depend on any trainable parameter, so there is no step to check")
        return
    what = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else f"a value of type {type(loss).__name__}"
    if function is own_loss:
        raise CaptureError(_no_own_loss(output, loss, what))
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__)
    use = "take its mean() or sum()" if is_tensor else "return a tensor without dimensions"
    raise CaptureError(f"the loss must be a scalar tensor, but [model] loss {module}:{name} gave {what}; {use}")


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


# The batches of other ranks and steps, which must be like the one that was traced.


_Leaf = tuple[object, ...]
"""Path, shape and dtype of a tensor of the batch; path and value of a constant."""


def first_batch(batch: Callable[[int, int], Any], name: str, mesh: Mesh, rank: int) -> Any:
    """What ``batch``, called ``name``, gives ``rank`` in step 0: a tuple, list or dict, with tensors at any depth.

    Raises :class:`CaptureError` for anything else, and if shapes, dtypes or constants are others for the last rank in step 1.
    """
    # One batch of another rank and another step is asked for, too: both must fit the one graph.
    here, last = mesh.data_rank(rank), mesh.data_ranks - 1
    with naming_user_frame(lambda: f"[model] batch {name}"):
        data, other = batch_of(batch(here, 0)), batch_of(batch(last, 1))
    if not isinstance(data, (tuple, list, dict)):
        raise CaptureError(
            f"[model] batch {name} gave a value of type {type(data).__name__}, expected a tuple or a dict of inputs"
        )
    _refuse_change(name, _described(data), _described(other), f"for rank {here}, step 0", f"rank {last}, step 1")
    return cut_sequences(data, mesh, rank)


def batch_of(given: Any) -> Any:
    """``given`` by a batch function, made of tuples, lists and dicts alone; a tensor by itself is a tuple of one.

    A tensor that has gaps in memory, as ``tokens[:, :-1]``, is copied without: so it is where it was copied or sent.

    Raises :class:`CaptureError` for an object that holds tensors, which could be no inputs of the graph.
    """
    try:
        return (_dense(given),) if isinstance(given, torch.Tensor) else _plain(given)
    except RecursionError:
        raise CaptureError(
            "[model] batch gave a value that contains itself, or is nested too deep; give tuples, lists and dicts of tensors"
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_plain, value))
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    if isinstance(value, torch.Tensor):
        return _dense(value)
    if not isinstance(value, type):
        _refuse_holder(value)
    return value


def _dense(value: torch.Tensor) -> torch.Tensor:
    if value.layout != torch.strided or torch.empty_like(value, device="meta").stride() == value.stride():
        return value
    return value.contiguous()


def _refuse_holder(value: Any) -> None:
    """Tensors within an object would be constants of the graph, the same on every rank."""
    kind = type(value).__name__
    if hasattr(value, "__array__"):
        raise CaptureError(f"[model] batch gave a {kind}, where a tensor is expected; make one with torch.as_tensor")
    if is_dataclass(value) or any(isinstance(item, torch.Tensor) for item in getattr(value, "__dict__", {}).values()):
        raise CaptureError(
            f"[model] batch gave a {kind}, whose tensors could be no inputs of the graph; "
            "give tuples, lists and dicts, such as vars() of it"
        )


class RankBatches:
    """The batches of one rank, step by step, each held against what was traced; ``traced`` are the graph's inputs."""

    def __init__(self, name: str, rank: int, traced: Iterable[Value]) -> None:
        self._name, self._rank = name, rank
        self._tensors: list[_Leaf] = [(value.fqn, value.shape, value.dtype) for value in traced if value.role == "batch"]
        self._first: list[_Leaf] | None = None

    def tensors(self, given: Any, step: int) -> list[torch.Tensor]:
        """The tensors that ``given``, a batch, holds, in the order of the inputs. Raises :class:`CaptureError` for others."""
        data = batch_of(given)
        found, there = _described(data), f"rank {self._rank}, step {step}"
        tensors = [leaf for leaf in found if len(leaf) == 3]
        _refuse_change(self._name, self._tensors, tensors, "where the step was traced", there)
        # The graph's inputs are tensors alone, so constants are held to this rank's first batch.
        self._first = found if self._first is None else self._first
        _refuse_change(self._name, self._first, found, f"for rank {self._rank} before", there)
        return pytree.tensors_in(data)


def _refuse_change(name: str, first: Sequence[_Leaf], other: Sequence[_Leaf], here: str, there: str) -> None:
    if first != other:
        changed = next((x, y) for x, y in zip_longest(first, other) if x != y)
        was, became = (" ".join(map(str, leaf)) if leaf else "nothing" for leaf in changed)
        raise CaptureError(
            f"[model] batch {name} gave {was} {here}, but {became} for {there}; "
            "only the values of its tensors may change, since one graph serves all"
        )


def _described(batch: Any) -> list[_Leaf]:
    """Path of each leaf of ``batch``, with shape and dtype of a tensor, or the value of a plain constant."""
    found: list[_Leaf] = []
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(leaf, torch.Tensor):
            found.append((pytree.keystr(path), tuple(leaf.shape), leaf.dtype))
        else:
            found.append((pytree.keystr(path), repr(leaf) if isinstance(leaf, (bool, int, float, str)) else type(leaf)))
    return found
