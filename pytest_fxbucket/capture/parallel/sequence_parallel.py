"""Activations parted along the sequence between the linears that tp parts (Megatron-LM, arXiv 2205.05198).

A rank of tp has its part of the sequence, dimension 1, wherever it would compute what all others compute, too: in norms,
dropout and sums of residuals. The sums of rowwise linears are reduced and scattered, and what colwise linears read is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture.backward import with_gradient
from pytest_fxbucket.capture.names import names_of
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.c10d import collective
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.mesh import Group

SEQUENCE = 1
"""Dimension of activations that is the sequence."""


@dataclass(frozen=True, slots=True)
class SequenceModules:
    """Modules of one model by what they do to activations that are parted along the sequence."""

    styles: Mapping[str, str] = field(default_factory=dict)
    """``sequence``: takes and gives parts; ``scatter``: gives parts of what it makes; ``gather``: takes parts, reads all."""
    linears: Mapping[str, str] = field(default_factory=dict)
    """Linears that are parted over tp, and whether ``colwise`` or ``rowwise``."""

    @property
    def regions(self) -> list[str]:
        """Modules with parted linears in them that take and give parts."""
        return [fqn for fqn, style in self.styles.items() if style == "sequence" and self._linears_in(fqn)]

    @property
    def alone(self) -> list[str]:
        """Modules, of norms say, that compute on a rank's part of what they are given."""
        return [fqn for fqn, style in self.styles.items() if style == "sequence" and not self._linears_in(fqn)]

    def is_in_region(self, fqn: str) -> bool:
        """Whether the module ``fqn`` lies in one that takes and gives parts."""
        return any(fqn.startswith(f"{region}.") for region in self.regions)

    def summed(self, model: nn.Module) -> frozenset[str]:
        """FQNs of the parameters that each rank reads on its own part: their gradients are to be summed over tp.

        Raises :class:`CaptureError` for one that is read on parts, and is whole where all of the sequence is.
        """
        names = names_of(model)
        alone, regions = tuple(f"{fqn}." for fqn in self.alone), tuple(f"{fqn}." for fqn in self.regions)
        on_part = {name for name in names if name.startswith(alone)} if alone else set[str]()
        for name in (name for name in names if regions and name.startswith(regions) and name not in on_part):
            module, _, last = name.rpartition(".")
            if module not in self.linears:
                region = next(fqn for fqn in self.regions if name.startswith(f"{fqn}."))
                raise CaptureError(
                    f"tp_plan makes {region} sequence, so all that reads its input is to be parted over tp, but parameter "
                    f'{name} is not; make its module colwise or rowwise, or, if it reads what those give, "sequence", too'
                )
            # This bias is added behind the reduce-scatter, so each rank adds it to its own part of the sequence.
            if self.linears[module] == "rowwise" and last == "bias":
                on_part.add(name)
        for alias, first in names.items():
            if (alias in on_part) != (first in on_part):
                raise CaptureError(
                    f"{alias} and {first} are one tied parameter, but tp_plan has one of them read on a part of the sequence "
                    "and the other on all of it; give both one way"
                )
        return frozenset(on_part.intersection(names.values()))

    def _linears_in(self, fqn: str) -> bool:
        return any(linear.startswith(f"{fqn}.") for linear in self.linears)

    def forwards(self, model: nn.Module, group: Group, place: torch.Tensor | None) -> dict[str, Callable[..., Any]]:
        """What is to be called instead of the forwards of modules, by FQN. ``place`` is this rank's index along ``group``."""
        found: dict[str, Callable[..., Any]] = {}
        regions = self.regions
        for fqn, style in self.styles.items():
            forward = model.get_submodule(fqn).forward
            if style == "scatter":
                found[fqn] = _scattering(fqn, forward, group, place)
            elif style == "gather":
                found[fqn] = _reading_all(fqn, forward, lambda x: gathered_sequence(x, group, place))
            elif fqn in regions:
                found[fqn] = _region(fqn, forward, group)
            else:
                # A view, as DTensor makes one: the gradients of the module's reads are added up before that of the residual is.
                found[fqn] = _reading_all(fqn, forward, lambda x: x.view_as(x))
        return found


def _region(fqn: str, forward: Callable[..., Any], group: Group) -> Callable[..., Any]:
    reading = _reading_all(fqn, forward, lambda x: gathered_sequence(x, group, None))

    def on_parts(*args: Any, **kwargs: Any) -> Any:
        out = reading(*args, **kwargs)
        part, made = _first_tensor((args, kwargs)), _first_tensor(out)
        if part is not None and made is not None and made.shape[: SEQUENCE + 1] != part.shape[: SEQUENCE + 1]:
            raise CaptureError(
                f"tp_plan makes {fqn} sequence, so it must give a rank's part of the sequence, {part.shape[SEQUENCE]} of "
                f"{part.shape[SEQUENCE] * group.size}, but its output has the shape {tuple(made.shape)}; "
                "make the linear that it ends with rowwise"
            )
        return out

    return on_parts


def _first_tensor(value: Any) -> torch.Tensor | None:
    return next(iter(pytree.tensors_in(value)), None)


def _reading_all(fqn: str, forward: Callable[..., Any], gathered: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """``forward`` on all of the sequence, where its first tensor is a rank's part."""

    def on_all(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[number] = gathered(leaf)
                break
        else:
            raise CaptureError(f"tp_plan gathers the input of {fqn} along the sequence, but it is called without a tensor")
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return forward(*args, **kwargs)

    return on_all


def _scattering(fqn: str, forward: Callable[..., Any], group: Group, place: torch.Tensor | None) -> Callable[..., Any]:
    assert place is not None  # a rank's index is an input where any module has a style

    def on_all(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        if not isinstance(out, torch.Tensor) or out.dim() <= SEQUENCE or out.shape[SEQUENCE] % group.size:
            what = f"a tensor of shape {tuple(out.shape)}" if isinstance(out, torch.Tensor) else f"a {type(out).__name__}"
            raise CaptureError(
                f"tp_plan scatters the output of {fqn}, which must be a tensor of (batch, sequence, ...) whose sequence "
                f"tp = {group.size} divides, but it is {what}"
            )
        # The whole is the same on every rank, and so is its gradient.
        return with_gradient(out, lambda one: own_part(one, group, place), lambda gradient: gathered(gradient, group))

    return on_all


def gathered_sequence(part: torch.Tensor, group: Group, place: torch.Tensor | None, dim: int = SEQUENCE) -> torch.Tensor:
    """From a rank's part of dimension ``dim`` to the whole.

    With ``place`` None each rank's gradient is a part of a sum, which is reduced and scattered. Else each rank has the whole
    gradient, and takes its own part.
    """

    def back(gradient: torch.Tensor) -> torch.Tensor:
        return reduced(gradient, group, dim) if place is None else own_part(gradient, group, place, dim)

    return with_gradient(part, lambda one: gathered(one, group, dim), back)


def reduced_out(part: torch.Tensor, group: Group) -> torch.Tensor:
    """From a rank's addend to its part, along the sequence, of the sum over ranks."""
    return with_gradient(part, lambda one: reduced(one, group), lambda gradient: gathered(gradient, group))


def summed(addend: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the ranks, on each of them."""
    return collective("all_reduce", addend.contiguous(), "sum", group.name)


# Collectives along the sequence. They cut and join dimension 0, so tensors are chunked and concatenated around them, as DTensor
# does it.


def gathered(part: torch.Tensor, group: Group, dim: int = SEQUENCE) -> torch.Tensor:
    """All ranks' parts of dimension ``dim``, in their order."""
    whole = collective("all_gather_into_tensor", part.contiguous(), group.size, group.name)
    return torch.cat(whole.chunk(group.size), dim)


def reduced(addend: torch.Tensor, group: Group, dim: int = SEQUENCE) -> torch.Tensor:
    """This rank's part of dimension ``dim`` of the sum over the ranks."""
    parts = torch.cat(addend.chunk(group.size, dim))
    return collective("reduce_scatter_tensor", parts, "sum", group.size, group.name)


def own_part(whole: torch.Tensor, group: Group, place: torch.Tensor, dim: int = SEQUENCE) -> torch.Tensor:
    """Part number ``place`` of dimension ``dim``: by an index that is an input, so that one graph serves every rank."""
    length = whole.shape[dim] // group.size
    return whole.index_select(dim, place * length + torch.arange(length, device=whole.device))


# Inputs that are not alike on all ranks though their graph is.


def place_name(dim: str) -> str:
    """Name of the input that holds a rank's index along the mesh dimension ``dim``."""
    return f"index along {dim}"
