"""How the members of a bucket become one tensor, and what arrives becomes members again: the packers, by name.

A packer is a callable ``packer(make, bucket) -> (packed, unpack)``. With ``make``, a
:class:`~pytest_fxbucket.passes.making.Maker`, it makes the nodes of the pack and gives ``packed``, what the launch sends;
``unpack(arrived)`` makes the nodes behind the launch's wait and gives one result for each input, contiguous and of the shape
that ``bucket.shapes`` says. What arrives is what the functional collective gives: for an all-gather the ranks' ``packed`` one
behind the other along dimension 0, for a reduce-scatter this rank's part of it, for an all-reduce a tensor like it. A graph
must be the same on every rank, so a packer is not told the rank. For example::

    def joined(make, bucket):
        parts = [make(aten.reshape.default, tensor, [-1]) for tensor in bucket.inputs]

        def unpack(arrived):
            rows = make(aten.view.default, arrived, [bucket.ranks, -1])
            pieces = make(aten.split_with_sizes_copy.default, rows, list(bucket.numels), 1)
            parts = [make(getitem, pieces, i) for i in range(len(bucket.inputs))]
            return [make(aten.view.default, part, list(shape)) for part, shape in zip(parts, bucket.shapes)]

        return make(aten.cat.default, parts), unpack
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Protocol

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.passes import default_packer
from pytest_fxbucket.plan.factories import import_callable

if TYPE_CHECKING:
    import torch
    from torch import fx

    from pytest_fxbucket.compat.fake_tensors import FakeTensor
    from pytest_fxbucket.graph.collectives import Kind
    from pytest_fxbucket.passes.making import Maker


@dataclass(frozen=True, slots=True)
class Bucket:
    """What a packer is asked to pack. Sizes are numbers, or nodes that compute symbolic ones."""

    kind: Kind
    """all_gather, reduce_scatter or all_reduce."""
    ranks: int
    """Of the process group; 0 for an all-reduce on a group that this process does not know."""
    inputs: tuple[fx.Node, ...]
    """Tensors to send, in byte order, as they lie: of any strides, empty ones too. ``meta["val"]`` has shape and dtype."""
    dtypes: tuple[torch.dtype, ...]
    """Of each input; several only if the plan says so, and only for an all-gather."""
    numels: tuple[int | fx.Node, ...]
    """Elements of each input in one rank's part: of a shard that is gathered, of the piece that arrives from a reduction."""
    shapes: tuple[tuple[int | fx.Node, ...], ...]
    """Shape of each result."""
    replaced: tuple[FakeTensor, ...]
    """Fake value of the wait that each result takes the place of."""


Unpack = Callable[["fx.Node"], Sequence["fx.Node"]]


class Packer(Protocol):
    """Packs one bucket; called when its launch is built."""

    def __call__(self, make: Maker, bucket: Bucket) -> tuple[fx.Node, Unpack]:
        """Make the pack's nodes; give what is sent, and what makes the nodes behind the wait."""


PACKERS: dict[str, Packer] = {"default": default_packer.pack}


def packer_named(name: str) -> Packer:
    """The packer ``name`` of :data:`PACKERS`, or the callable that ``module:callable`` names.

    Raises :class:`PlanError` if there is none.
    """
    if name in PACKERS:
        return PACKERS[name]
    if ":" in name:
        return import_callable(name, f'packer "{name}"')
    close = get_close_matches(name, PACKERS, n=1)
    hint = f'did you mean "{close[0]}"' if close else f"known: {', '.join(sorted(PACKERS))}"
    raise PlanError(f'packer "{name}" is not known: {hint}, or name one of your own as "module:callable"')
