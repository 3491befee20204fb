"""Runs in the ranks: the body of one test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from pytest_fxbucket.compat.pytest_rewrite import comparisons_explained, rewritten

Kind = Literal["passed", "skipped", "xfailed"]


@dataclass(frozen=True, slots=True)
class PerRank:
    """Stands for a value that each rank makes itself: its rank, its mesh, or its folder below `path`."""

    kind: Literal["rank", "mesh", "folder"]
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Body:
    """What a rank needs to run a test's body."""

    module: str
    file: Path
    function: str
    owner: str
    """Class of the test as a dotted name; "" for a function."""
    state: Mapping[str, Any]
    """Attributes that set-up gave to the test's instance."""
    values: Mapping[str, Any]
    """Fixtures and parameters by name."""
    mesh: Mapping[str, int]
    """Size of each mesh dimension by name."""
    verbosity: int
    ini: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ending:
    """How the body ended on one rank, if not by an error."""

    kind: Kind
    reason: str = ""


def run(rank: int, world: int, body: Body) -> Ending:
    """Run the body; an assertion or any other error is the job's."""
    __tracebackhide__ = True
    function = _function(body)
    values = {name: _made(value, rank, body) for name, value in body.values.items()}
    try:
        with comparisons_explained(body.verbosity, body.ini):
            function(**values)
    except pytest.skip.Exception as skip:
        return Ending("skipped", str(skip))
    except pytest.xfail.Exception as xfail:
        return Ending("xfailed", str(xfail))
    return Ending("passed")


def _function(body: Body) -> Any:
    __tracebackhide__ = True
    found: Any = rewritten(body.module, body.file)
    if not body.owner:
        return getattr(found, body.function)
    for name in body.owner.split("."):
        found = getattr(found, name)
    instance = found()
    vars(instance).update(body.state)
    return getattr(instance, body.function)


def _made(value: Any, rank: int, body: Body) -> Any:
    if not isinstance(value, PerRank):
        return value
    if value.kind == "rank":
        return rank
    if value.path is not None:
        folder = value.path / f"rank{rank}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder
    return _mesh(body.mesh)


def _mesh(sizes: Mapping[str, int]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    from pytest_fxbucket.ranks import device

    kind = device().partition(":")[0]
    return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
