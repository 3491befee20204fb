"""How parameters travel in each parallel mode: a rank's part of one, the whole gathered from it, and its gradient reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch

from pytest_fxbucket.capture.blame import blamed
from pytest_fxbucket.capture.parallel.replicated import Replicated
from pytest_fxbucket.capture.parallel.sharded import Sharded
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.units import show

if TYPE_CHECKING:
    from pytest_fxbucket.capture.mesh import Mesh
    from pytest_fxbucket.plan.schema import Parallel


class Mode(Protocol):
    """A parallel mode. Its methods are traced, but for ``part``, and must be the same on every rank."""

    @property
    def along(self) -> str:
        """Mesh dimension over which parameters are parted; empty if every rank has all of them."""

    def part(self, whole: torch.Tensor, mesh: Mesh, rank: int) -> torch.Tensor:
        """Rank's part of a parameter: a new contiguous tensor, of one shape on all ranks."""

    def gather(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The whole parameter of ``shape`` again, from ``part`` in the dtype that it is gathered in."""

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Rank's part of the gradient, averaged over all ranks of the batch, from the whole one of this rank's batch."""


@dataclass(frozen=True, slots=True)
class Modes:
    """What the parameters of one step travel by."""

    dense: Mode
    experts: Mode

    def of(self, is_expert: bool) -> Mode:
        """The mode of a parameter."""
        return self.experts if is_expert else self.dense


def modes_of(parallel: Parallel, mesh: Mesh, where: str = "[parallel] mode") -> Modes:
    """The modes that ``parallel`` asks for on ``mesh``. Raises CaptureError or PlanError for a callable that gives none."""
    if parallel.mode == "replicate":
        mode: Mode = Replicated(mesh.group("dp_replicate"))
        return Modes(mode, mode)
    if parallel.mode in ("fully_shard", "hybrid_shard"):
        replicate = mesh.group("dp_replicate") if parallel.mode == "hybrid_shard" else None
        first = parallel.reduce_order == "scatter_first"
        dense = Sharded("dp_shard", mesh.group("dp_shard"), replicate, first)
        inner = "dp_shard_mod_ep"
        return Modes(
            dense, Sharded(inner, mesh.group(inner), replicate, first, mesh.degree("ep")) if parallel.ep > 1 else dense
        )
    mode = _foreign(parallel.mode, parallel, mesh, where)
    return Modes(mode, mode)


def _foreign(name: str, parallel: Parallel, mesh: Mesh, where: str) -> Mode:
    make = cast("Callable[[Parallel, Mesh], object]", import_callable(name, where))
    with blamed(lambda: f"mode {name}"), _naming(f"mode {name}: "):
        made = make(parallel, mesh)
    mode = _checked(name, made)
    if mode.along:
        with _naming(f"mode {name} parts parameters along {show(mode.along)}, but "):
            mesh.refuse_unknown(mode.along)
    return mode


@contextmanager
def _naming(beginning: str) -> Iterator[None]:
    """Begin what a mesh says of a name that it does not have with who used it."""
    try:
        yield
    except CaptureError as error:
        raise CaptureError(f"{beginning}{error}") from None


def _checked(name: str, made: object) -> Mode:
    if made is None:
        raise CaptureError(f"mode {name} returned None, expected a Mode")
    lacking = [method for method in ("part", "gather", "reduce") if not callable(getattr(made, method, None))]
    if not isinstance(getattr(made, "along", None), str):
        lacking.insert(0, "along")
    if lacking:
        kind, what = type(made).__name__, f"no {'' if lacking[0] == 'along' else 'method '}{lacking[0]}"
        raise CaptureError(f"mode {name} gave a value of type {kind}, which has {what}; expected a Mode")
    return cast("Mode", made)
