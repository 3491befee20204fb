"""The marker `fxbucket_ranks`: what it asks for, and a test's body sent to the ranks and judged."""

from __future__ import annotations

import inspect
import math
import unittest
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import pytest

from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.options import fx_session
from pytest_fxbucket.ranks.backend import BACKENDS
from pytest_fxbucket.terminal import error_text

if TYPE_CHECKING:
    from pytest_fxbucket.body.job import Ending

NAME = "fxbucket_ranks"
SIGNATURE = 'fxbucket_ranks(world, backend="gloo", timeout_s=60, mesh=None)'
MARKER = f"{SIGNATURE}: run the test's body on every one of `world` ranks; mesh is a size for each dimension by name"
_ALONE = {
    "request": "read what the body needs from it in a fixture of your own",
    "monkeypatch": "use pytest.MonkeyPatch.context() in the body",
    **dict.fromkeys(
        ("capsys", "capfd", "capsysbinary", "capfdbinary", "capteesys"), "what ranks print is shown by rank anyway"
    ),
    **dict.fromkeys(("caplog", "recwarn"), "use logging or warnings.catch_warnings in the body"),
    **dict.fromkeys(("pytester", "testdir", "pytestconfig", "record_property", "cache", "subtests"), "keep it out of the body"),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a marker asks for."""

    world: int
    backend: str = "gloo"
    timeout_s: float = 60.0
    mesh: Mapping[str, int] | None = None

    @property
    def sizes(self) -> Mapping[str, int]:
        """The mesh's sizes by name; without one all ranks are `dp_shard`."""
        return self.mesh or {"dp_shard": self.world}


def is_marked(item: pytest.Item) -> bool:
    """Say whether the body of `item` is to run on ranks."""
    return item.get_closest_marker(NAME) is not None


def check(item: pytest.Item) -> None:
    """Fail a marked test that cannot run on ranks, with one sentence, before anything of it ran."""
    if not is_marked(item):
        return
    problem = _problem(item)
    if problem:
        pytest.fail(f"{item.nodeid}: {problem}", pytrace=False)


def per_rank(request: pytest.FixtureRequest, kind: Literal["rank", "mesh"]) -> object:
    """Return what stands for a rank's own value; fail a test that does not run on ranks."""
    from pytest_fxbucket.body.job import PerRank

    if not isinstance(request.node, pytest.Item) or not is_marked(request.node):
        pytest.fail(f"{request.fixturename} is for tests that run on ranks; mark this one with @pytest.mark.{SIGNATURE}", False)
    return PerRank(kind)


def run_body(item: pytest.Function) -> None:
    """Run the body of a marked test on its ranks; raise what pytest makes the item's outcome of."""
    told = _ran(item)
    if isinstance(told, str):
        pytest.fail(told, pytrace=False)
    kinds = sorted({ending.kind for ending in told})
    if len(kinds) > 1:
        each = ", ".join(f"rank {rank} {_ended(ending)}" for rank, ending in enumerate(told))
        pytest.fail(f"{item.nodeid}: the ranks disagree: {each}", pytrace=False)
    if kinds == ["skipped"]:
        pytest.skip(told[0].reason)
    if kinds == ["xfailed"]:
        pytest.xfail(told[0].reason)


def _ran(item: pytest.Function) -> list[Ending] | str:
    """How the body ended on each rank, or what to fail with."""
    from pytest_fxbucket.ranks.failure import RankFailure

    wanted, fx = _wanted(item), fx_session(item.config)
    body = _body(item, wanted)
    outputs: dict[int, str] = {}
    try:
        with fx.progress.watching(item.nodeid):
            return fx.pools.get(wanted.world, wanted.backend).run(  # type: ignore[return-value]
                "pytest_fxbucket.body.job:run",
                [body] * wanted.world,
                timeout_s=wanted.timeout_s,
                paths=[str(item.path.parent)],
                what=item.nodeid,
                on_output=outputs.__setitem__,
            )
    except RankFailure as failure:
        return "\n".join(failure.lines(with_output=False))
    except FxbucketError as error:
        return error_text(error)
    finally:
        _show(item, outputs)


def _body(item: pytest.Function, wanted: Wanted) -> Any:
    from pytest_fxbucket.body.job import Body
    from pytest_fxbucket.compat.pytest_rewrite import INI_NAMES

    return Body(
        module=item.module.__name__,
        file=item.path,
        function=item.originalname,
        owner=item.cls.__qualname__ if item.cls is not None else "",
        state=vars(item.instance) if item.cls is not None else {},
        values={name: _sendable(name, item.funcargs[name], item) for name in _arguments(item)},
        mesh=wanted.sizes,
        verbosity=item.config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS),
        ini={name: value for name in INI_NAMES if (value := _ini(item.config, name)) is not None},
    )


def _ini(config: pytest.Config, name: str) -> Any:
    try:
        return config.getini(name)
    except ValueError:  # this pytest has no such key
        return None


def _arguments(item: pytest.Function) -> list[str]:
    return [name for name in inspect.signature(item.obj).parameters if name in item.funcargs]


def _sendable(name: str, value: Any, item: pytest.Function) -> Any:
    from pytest_fxbucket.body.job import PerRank
    from pytest_fxbucket.ranks.wire import Unpicklable, pack

    if name == "tmp_path" and isinstance(value, Path):
        return PerRank("folder", value)
    if name in _ALONE:
        _refuse(item, f"the fixture {name} works in pytest's own process only, not on ranks; {_ALONE[name]}")
    try:
        pack(value)
    except Unpicklable as error:
        _refuse(
            item, f"the value of {name} cannot be sent to the ranks ({error}); make it in the body, or give what it is made of"
        )
    return value


def _refuse(item: pytest.Item, sentence: str) -> NoReturn:
    pytest.fail(f"{item.nodeid}: {sentence}", pytrace=False)


def _show(item: pytest.Item, outputs: Mapping[int, str]) -> None:
    """Put each rank's output into the report; with -s on the screen."""
    for rank, text in sorted(outputs.items()):
        if item.config.option.capture == "no":
            for line in text.splitlines():
                print(f"[rank {rank}] {line}")
        else:
            item.add_report_section("call", f"output of rank {rank}", text)


def _ended(ending: Ending) -> str:
    return f"{ending.kind} ({ending.reason})" if ending.reason else ending.kind


def _wanted(item: pytest.Item) -> Wanted:
    marker = item.get_closest_marker(NAME)
    assert marker is not None
    return Wanted(*marker.args, **marker.kwargs)


def _problem(item: pytest.Item) -> str:
    if not isinstance(item, pytest.Function) or (item.cls is not None and issubclass(item.cls, unittest.TestCase)):
        return f"only test functions and methods of plain classes run on ranks; take @pytest.mark.{NAME} off, or write one"
    if inspect.iscoroutinefunction(item.obj) or inspect.isasyncgenfunction(item.obj):
        return f"an async test does not run on ranks; let a plain function call asyncio.run, or take @pytest.mark.{NAME} off"
    try:
        wanted = _wanted(item)
    except TypeError as error:
        return f"expected @pytest.mark.{SIGNATURE}, got {_given(item)}: {str(error).partition('() ')[2]}"
    return next(_wrong_values(wanted), "")


def _wrong_values(wanted: Wanted) -> Iterator[str]:
    if type(wanted.world) is not int or wanted.world < 1:
        yield f"{NAME}: world is {wanted.world!r}; expected a number of ranks, 1 or more"
    if wanted.backend not in BACKENDS:
        yield f"{NAME}: {wanted.backend!r} is no backend; expected one of {', '.join(BACKENDS)}"
    if not isinstance(wanted.timeout_s, (int, float)) or not wanted.timeout_s > 0:
        yield f"{NAME}: timeout_s is {wanted.timeout_s!r}; expected seconds, more than 0"
    if wanted.mesh is not None and not _fits(wanted.mesh, wanted.world):
        yield f"{NAME}: mesh is {wanted.mesh!r}; expected a size for each dimension by name, {wanted.world} ranks in all"


def _fits(mesh: Any, world: int) -> bool:
    return (
        isinstance(mesh, Mapping)
        and all(isinstance(name, str) and type(size) is int for name, size in mesh.items())
        and math.prod(mesh.values()) == world
    )


def _given(item: pytest.Item) -> str:
    marker = item.get_closest_marker(NAME)
    assert marker is not None
    parts: Sequence[str] = [*map(repr, marker.args), *(f"{name}={value!r}" for name, value in marker.kwargs.items())]
    return f"({', '.join(parts)})"
