"""The user's test modules as pytest imported them, the same imports in a rank, and values that each rank makes itself.

pytest's import modes name modules in ways that the import path alone does not give back (importlib mode above all), and rewrite
the asserts of some. So pytest's process says which name is which file, and a rank imports by that.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NoReturn

import pytest

from pytest_fxbucket.errors import RankError
from pytest_fxbucket.pytest_plugin.pytest_internals import RewritingLoader, is_rewritten

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_OURS = __name__.partition(".")[0]


@dataclass(frozen=True, slots=True)
class ModuleOrigin:
    """Where a module comes from: its file, None for a package without one; and where its submodules lie, if it is a package."""

    file: str | None
    folders: tuple[str, ...] | None = None
    is_rewritten: bool = False


_KNOWN: pytest.StashKey[tuple[tuple[str, int], dict[str, ModuleOrigin]]] = pytest.StashKey()


def origins(item: pytest.Function) -> dict[str, ModuleOrigin]:
    """The item's test module, others of the user's that pytest rewrote (conftest, helpers), and the packages of all these.

    Other test modules are left out: there can be thousands.
    """
    # A walk over all modules takes a millisecond; from test to test of one file they hardly ever change.
    state = (item.module.__name__, len(sys.modules))
    known = item.config.stash.get(_KNOWN, None)
    if known is None or known[0] != state:
        known = item.config.stash[_KNOWN] = (state, _origins(item))
    return known[1]


def _origins(item: pytest.Function) -> dict[str, ModuleOrigin]:
    name, patterns = item.module.__name__, item.config.getini("python_files")
    found = {name: _origin(item.module)}
    # Of the modules that pytest rewrote only helpers and conftests go along, not other test modules, which python_files
    # matches.
    # So do modules that are found by the import path, on which another one of that name may be first by now.
    roots = (str(item.config.rootpath), str(item.path.parent))
    for other, module in list(sys.modules.items()):
        if (
            not isinstance(module, ModuleType)
            or other in found
            or not (is_rewritten(module) or _is_below(roots, other, module))
        ):
            continue
        origin = _origin(module)
        if _is_users(other, origin) and not any(fnmatch(Path(origin.file or "").name, one) for one in patterns):
            found[other] = origin
    for other in [package for one in found for package in _packages(one)]:
        if other not in found and other in sys.modules:
            found[other] = _origin(sys.modules[other])
    return found


@contextlib.contextmanager
def own_conftest(item: pytest.Item) -> Iterator[None]:
    """In the block the module ``conftest`` is the one nearest to the item.

    All conftests outside of packages share that name in ``sys.modules``, where the one imported last is found.
    """
    plugins = item.config.pluginmanager.get_plugins()
    files = {getattr(one, "__file__", None): one for one in plugins if getattr(one, "__name__", "") == "conftest"}
    nearest = next((files[file] for folder in item.path.parents if (file := str(folder / "conftest.py")) in files), None)
    last = sys.modules.get("conftest")
    if last is not None and nearest is not None:
        sys.modules["conftest"] = nearest
    try:
        yield
    finally:
        if last is not None:
            sys.modules["conftest"] = last


def _origin(module: ModuleType) -> ModuleOrigin:
    folders = getattr(module, "__path__", None)
    return ModuleOrigin(
        getattr(module, "__file__", None), tuple(folders) if folders is not None else None, is_rewritten(module)
    )


def _is_below(roots: Sequence[str], name: str, module: ModuleType) -> bool:
    file = vars(module).get("__file__")  # some modules, as torch.classes, make up whatever they are asked for
    return "." not in name and isinstance(file, str) and any(map(Path(file).is_relative_to, roots))


def _is_users(name: str, origin: ModuleOrigin) -> bool:
    return origin.file is not None and name.partition(".")[0] != _OURS and _INSTALLED.isdisjoint(Path(origin.file).parts)


def _packages(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


class Finder(MetaPathFinder):
    """Finds the modules it was told of, before Python looks along the import path."""

    def __init__(self) -> None:
        self._origins: Mapping[str, ModuleOrigin] = {}

    def tell(self, origins: Mapping[str, ModuleOrigin]) -> None:
        """Find these from now on; a module of one of their names that came from another file is imported anew."""
        self._origins = origins
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)
        for name, origin in origins.items():
            module = sys.modules.get(name)
            if module is not None and getattr(module, "__file__", None) != origin.file:
                del sys.modules[name]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module it was told of."""
        origin = self._origins.get(fullname)
        if origin is None:
            return None
        folders = list(origin.folders) if origin.folders is not None else None
        if origin.file is None:
            # Without a loader Python takes it for a namespace package, which is what has no file.
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = folders or []
            return spec
        loader = RewritingLoader(fullname, origin.file) if origin.is_rewritten else None
        return importlib.util.spec_from_file_location(fullname, origin.file, loader=loader, submodule_search_locations=folders)


# Values that each rank makes for itself.


_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "contains")
_CONVERTING = ("int", "index", "float", "str", "format", "iter", "len", "getitem", "call")
_COUNTING = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "divmod"),
    *("rdivmod", "pow", "rpow", "lshift", "rlshift", "rshift", "rrshift", "and", "rand", "or", "ror", "xor", "rxor"),
    *("neg", "pos", "abs", "invert"),
)


class PerRank:
    """Stands in pytest's process for a value that each rank has of its own: its number, its mesh, or its folder below ``path``.

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
        # Copying, pickling and pytest probe for dunder methods, and a probe takes only AttributeError for "no".
        if name.startswith("__"):
            raise AttributeError(name)
        __tracebackhide__ = True
        _refuse(self)


def _refuse(value: PerRank, *_: object) -> NoReturn:
    __tracebackhide__ = True
    raise RankError(f"{value!r} is known on the ranks only, not where fixtures run; use it in the test's body")


# Python looks up operators on the class and never asks __getattr__, so each of them needs its own refusal.
for _name in (*_COMPARING, *_CONVERTING, *_COUNTING):
    setattr(PerRank, f"__{_name}__", _refuse)


def on_rank(value: object, rank: int, sizes: Mapping[str, int]) -> object:
    """``value`` as ``rank`` has it, also in plain containers; ``sizes``: those of the mesh, by name of the dimension."""
    if not isinstance(value, PerRank):
        return _put_in(value, rank, sizes) if _holds_one(value) else value
    if value.kind == "rank":
        return rank
    if value.path is None:
        return _mesh(sizes)
    folder = value.path / f"rank{rank}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _holds_one(value: object) -> bool:
    return isinstance(value, PerRank) or any(map(_holds_one, _inside(value)))


def _inside(value: Any) -> Iterable[object]:
    return value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()


def _put_in(value: Any, rank: int, sizes: Mapping[str, int]) -> object:
    if type(value) is dict:
        return {key: on_rank(one, rank, sizes) for key, one in value.items()}
    return type(value)(on_rank(one, rank, sizes) for one in value)


def _mesh(sizes: Mapping[str, int]) -> object:
    from torch.distributed.device_mesh import init_device_mesh

    from pytest_fxbucket.ranks import device

    return init_device_mesh(device().partition(":")[0], tuple(sizes.values()), mesh_dim_names=tuple(sizes))
