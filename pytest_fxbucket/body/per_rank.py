"""Values that each rank makes for itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

from pytest_fxbucket.errors import RankError

_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "contains")
_CONVERTING = ("int", "index", "float", "str", "format", "iter", "len", "getitem", "call")
_COUNTING = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "floordiv", "mod", "rmod", "and", "or", "xor", "neg")


class PerRank:
    """Stands in pytest's process for a value that each rank has of its own: its number, its mesh, or its folder below `path`.

    Whatever a fixture does with it but hand it on raises RankError: there it would be the same for all ranks.
    """

    __slots__ = ("kind", "path")

    def __init__(self, kind: Literal["rank", "mesh", "folder"], path: Path | None = None) -> None:
        self.kind, self.path = kind, path

    def __reduce__(self) -> tuple[Any, ...]:
        return PerRank, (self.kind, self.path)

    def __repr__(self) -> str:
        return f"<the {self.kind} of each rank>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        __tracebackhide__ = True
        _refuse(self)


def _refuse(value: PerRank, *_: object) -> NoReturn:
    __tracebackhide__ = True
    raise RankError(f"{value!r} is known on the ranks only, not where fixtures run; use it in the test's body")


for _name in (*_COMPARING, *_CONVERTING, *_COUNTING):
    setattr(PerRank, f"__{_name}__", _refuse)


def made(value: object, rank: int, sizes: Mapping[str, int]) -> object:
    """What `value` is on `rank`; `sizes` are those of the mesh, by name of the dimension."""
    if not isinstance(value, PerRank):
        return value
    if value.kind == "rank":
        return rank
    if value.path is None:
        return _mesh(sizes)
    folder = value.path / f"rank{rank}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _mesh(sizes: Mapping[str, int]) -> object:
    from torch.distributed.device_mesh import init_device_mesh

    from pytest_fxbucket.ranks import device

    return init_device_mesh(device().partition(":")[0], tuple(sizes.values()), mesh_dim_names=tuple(sizes))
