"""Builds one merged launch out of several: pack, launch, wait, unpack. The same nodes on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.collectives import c10d_functional
from pytest_fxbucket.errors import PassError
from pytest_fxbucket.passes.fake import alone, fake_value, has_numbers
from pytest_fxbucket.passes.folding import folded
from pytest_fxbucket.passes.making import Maker
from pytest_fxbucket.passes.packers import PACKERS, Bucket, packer_named
from pytest_fxbucket.passes.provenance import shared_meta
from pytest_fxbucket.passes.storage_readers import need_own_storage

if TYPE_CHECKING:
    from torch import fx

    from pytest_fxbucket.compat.fake_tensors import FakeTensor
    from pytest_fxbucket.passes.launches import Part
    from pytest_fxbucket.passes.packers import Unpack
    from pytest_fxbucket.passes.targets import Target


@dataclass(frozen=True, slots=True)
class Packed:
    """The nodes of one merged launch, in order."""

    pack: tuple[fx.Node, ...]
    launch: fx.Node
    wait: fx.Node
    unpack: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    """What each part of each member becomes."""
    absorbed: tuple[fx.Node, ...]
    """Casts that the pack does now; nobody else reads them."""


def build(
    graph: fx.Graph, members: Sequence[Target], *, packer: str = "default", foldable: Callable[[fx.Node], bool]
) -> Packed:
    """Create the nodes of one launch for all ``members`` at the graph's insertion point; nothing is replaced or erased.

    ``members`` agree in kind, op, group and device, and in dtype unless they are gathered. ``packer`` is as
    :func:`~pytest_fxbucket.passes.packers.packer_named` takes it. ``foldable(cast)`` says whether a cast that stands before a
    launch may be done by the pack instead, which only the registered packers are asked to.

    Raises :class:`PassError` for values that are not fake and for a packer that does not do its work, :class:`PlanError` for a
    packer that is not known.
    """
    parts = [part for member in members for part in member.parts]
    cast = folded([p.input for p in parts], [m.launch for m in members], foldable) if packer in PACKERS else None
    inputs = tuple(cast.sources) if cast else tuple(part.input for part in parts)
    make = Maker(graph, fake_value(inputs[0]).fake_mode, shared_meta(members))
    bucket = _bucket(make, members[0], inputs, parts)
    name = f'packer "{packer}"'
    packed, unpack = _pair(name, _asked(name, packer_named(packer), make, bucket))
    packed = cast.apply(make, packed) if cast else packed
    pack = make.taken()
    launch, wait = _launched(make, members[0], packed)
    make.taken()
    results = _checked(name, _asked(name, unpack, wait), parts, bucket)
    results = [_in_own_storage(make, result, part) for result, part in zip(results, parts, strict=True)]
    for result, value in zip(results, bucket.replaced, strict=True):
        if result.meta["val"] is not value and has_numbers(value) and value.is_contiguous():
            result.meta["val"] = value
    return Packed(pack, launch, wait, make.taken(), tuple(results), cast.casts if cast else ())


def _bucket(make: Maker, first: Target, inputs: tuple[fx.Node, ...], parts: Sequence[Part]) -> Bucket:
    """What the packer is told. Symbolic sizes are computed before the launch, so that its inputs need not live longer."""
    numels = [make.numel(node) for node in inputs]
    shapes = [[make.size(node, dim) for dim in range(fake_value(node).dim())] for node in inputs]
    if first.kind == "all_gather":
        shapes = [[make.times(shape[0], first.ranks), *shape[1:]] for shape in shapes]
    elif first.kind == "reduce_scatter":
        numels = [make.over(numel, first.ranks) for numel in numels]
        shapes = [[make.over(shape[0], first.ranks), *shape[1:]] for shape in shapes]
    return Bucket(
        kind=first.kind,
        ranks=first.ranks,
        inputs=inputs,
        dtypes=tuple(fake_value(node).dtype for node in inputs),
        numels=tuple(numels),
        shapes=tuple(tuple(shape) for shape in shapes),
        replaced=tuple(fake_value(part.waits[0]) for part in parts),
    )


def _launched(make: Maker, first: Target, packed: fx.Node) -> tuple[fx.Node, fx.Node]:
    c10d = c10d_functional()
    if first.kind == "all_gather":
        launch = make(c10d.all_gather_into_tensor.default, packed, first.ranks, first.group)
    elif first.kind == "reduce_scatter":
        launch = make(c10d.reduce_scatter_tensor.default, packed, first.op, first.ranks, first.group)
    else:
        launch = make(c10d.all_reduce.default, packed, first.op, first.group)
    return launch, make(c10d.wait_tensor.default, launch)


def _asked(packer: str, function: Callable[..., Any], *args: Any) -> Any:
    """What ``function`` of the packer gives; raises :class:`PassError` that names it for whatever it raises."""
    try:
        return function(*args)
    except PassError as error:
        raise PassError(f"{packer}: {error}") from error
    except Exception as error:
        raise PassError(f"{packer} raised {type(error).__name__}: {error}") from error


def _pair(packer: str, given: Any) -> tuple[fx.Node, Unpack]:
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], torch.fx.Node) and callable(given[1]):
        return given
    raise PassError(f"{packer} gave a {type(given).__name__}, where (packed node, unpack) was expected")


def _checked(packer: str, results: Sequence[fx.Node], parts: Sequence[Part], bucket: Bucket) -> list[fx.Node]:
    """``results``, if they are what the waits were; raises :class:`PassError` that names ``packer`` if not."""
    if len(results) != len(parts):
        raise PassError(f"{packer} gave {len(results)} results for {len(parts)} inputs")
    for result, part, wanted in zip(results, parts, bucket.replaced, strict=True):
        value = fake_value(result)
        strided = "" if not has_numbers(value) or value.is_contiguous() else ", not contiguous"
        if (_sizes(value), value.dtype) != (_sizes(wanted), wanted.dtype) or strided:
            raise PassError(
                f"{packer} made {_words(value)}{strided}, for {part.input.name}, where {_words(wanted)} was expected"
            )
    return list(results)


def _in_own_storage(make: Maker, result: fx.Node, part: Part) -> fx.Node:
    """``result``, or a copy of it if it lies among others and somebody who reads it must not see that."""
    if alone(fake_value(result)) or not any(need_own_storage(wait) for wait in part.waits):
        return result
    return make(torch.ops.aten.clone.default, result, memory_format=torch.contiguous_format)


def _sizes(value: FakeTensor) -> list[Any]:
    """Shape of ``value``; symbolic sizes are all alike, since telling them apart would ask for guards."""
    return [size if isinstance(size, int) else "symbolic" for size in value.shape]


def _words(value: FakeTensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
