"""The marker ``fxbucket_ranks``: reads its arguments, sends the test's body to the ranks, and makes the outcome of theirs."""

from __future__ import annotations

import inspect
import math
import unittest
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import pytest

from pytest_fxbucket.backends import CHOICES, choose, row_of
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.pytest_plugin.distributed_test.modules import PerRank
from pytest_fxbucket.pytest_plugin.session import fx_session
from pytest_fxbucket.pytest_plugin.terminal import error_text
from pytest_fxbucket.words import LONGEST_S

if TYPE_CHECKING:
    from pytest_fxbucket.pytest_plugin.distributed_test.job import BodyEnding, TestBody

__all__ = ["MARKER", "check", "is_marked", "per_rank", "run_body"]

NAME = "fxbucket_ranks"
SIGNATURE = 'fxbucket_ranks(world, backend="gloo", timeout_s=60, mesh=None)'
MARKER = f"{SIGNATURE}: run the test's body on every one of `world` ranks; mesh is a size for each dimension by name"


@dataclass(frozen=True, slots=True)
class MarkerRequest:
    """What a marker asks for."""

    world: int
    backend: str = "gloo"
    timeout_s: float = 60.0
    mesh: Mapping[str, int] | None = None

    @property
    def sizes(self) -> Mapping[str, int]:
        """The mesh's sizes by name; without one all ranks are ``dp_shard``."""
        return self.mesh or {"dp_shard": self.world}


def is_marked(item: pytest.Item) -> bool:
    """Say whether the body of ``item`` is to run on ranks."""
    return item.get_closest_marker(NAME) is not None


def check(item: pytest.Item) -> None:
    """Fail a marked test that cannot run on ranks, with one sentence, before anything of it ran."""
    problem = _problem(item) if is_marked(item) else ""
    if problem:
        pytest.fail(f"{item.nodeid}: {problem}", pytrace=False)


def wanted(item: pytest.Item) -> MarkerRequest:
    """What the closest marker of a marked test asks for. Raises TypeError for arguments that it does not take."""
    marker = item.get_closest_marker(NAME)
    assert marker is not None
    return MarkerRequest(*marker.args, **marker.kwargs)


def _problem(item: pytest.Item) -> str:
    if not isinstance(item, pytest.Function) or (item.cls is not None and issubclass(item.cls, unittest.TestCase)):
        return f"only test functions and methods of plain classes run on ranks; take @pytest.mark.{NAME} off, or write one"
    if inspect.iscoroutinefunction(item.obj) or inspect.isasyncgenfunction(item.obj):
        return f"an async test does not run on ranks; let a plain function call asyncio.run, or take @pytest.mark.{NAME} off"
    try:
        asked = wanted(item)
    except TypeError as error:
        return f"expected @pytest.mark.{SIGNATURE}, got {_marker_given(item)}: {str(error).partition('() ')[2]}"
    return next(_wrong_values(asked), "")


def _wrong_values(asked: MarkerRequest) -> Iterator[str]:
    if type(asked.world) is not int or asked.world < 1:
        yield f"{NAME}: world is {asked.world!r}; expected a number of ranks, 1 or more"
    if asked.backend not in CHOICES:
        yield f"{NAME}: {asked.backend!r} is no backend; expected one of {', '.join(CHOICES)}"
    if not isinstance(asked.timeout_s, (int, float)) or not 0 < asked.timeout_s <= LONGEST_S:
        yield f"{NAME}: timeout_s is {asked.timeout_s!r}; expected seconds, more than 0 and at most {LONGEST_S}"
    if asked.mesh is not None and not _fits(asked.mesh, asked.world):
        yield f"{NAME}: mesh is {asked.mesh!r}; expected a size for each dimension by name, {asked.world} ranks in all"


def _fits(mesh: Any, world: int) -> bool:
    return (
        isinstance(mesh, Mapping)
        and all(isinstance(name, str) and type(size) is int and size > 0 for name, size in mesh.items())
        and math.prod(mesh.values()) == world
    )


def _marker_given(item: pytest.Item) -> str:
    marker = item.get_closest_marker(NAME)
    assert marker is not None
    parts = [*map(repr, marker.args), *(f"{name}={value!r}" for name, value in marker.kwargs.items())]
    return f"({', '.join(parts)})"


# Sends a test's body to the ranks, and makes their outcomes the item's.


_ALONE = {
    "request": "read what the body needs from it in a fixture of your own",
    "monkeypatch": "use pytest.MonkeyPatch.context() in the body",
    **dict.fromkeys(
        ("capsys", "capfd", "capsysbinary", "capfdbinary", "capteesys"),
        "what ranks print is shown by rank anyway, and contextlib.redirect_stdout works in the body",
    ),
    **dict.fromkeys(
        ("fxbucket_golden", "fxbucket_expect"),
        "compare in a test without the marker: a graph's text is the same on every rank",
    ),
    **dict.fromkeys(("caplog", "recwarn"), "use logging or warnings.catch_warnings in the body"),
    **dict.fromkeys(("pytester", "testdir", "pytestconfig", "record_property", "cache", "subtests"), "keep it out of the body"),
}


def per_rank(request: pytest.FixtureRequest, kind: Literal["rank", "mesh"]) -> object:
    """Return the stand-in for a value that each rank makes itself; fail a test that does not run on ranks."""
    if not isinstance(request.node, pytest.Item) or not is_marked(request.node):
        pytest.fail(f"{request.fixturename} is for tests that run on ranks; mark this one with @pytest.mark.{SIGNATURE}", False)
    return PerRank(kind)


def run_body(item: pytest.Function) -> None:
    """Run the body of a marked test on its ranks, and raise the failure, skip or xfail that pytest is to report."""
    endings = _ran(item)
    kinds = {ending.kind for ending in endings}
    if len(kinds) > 1:
        each = ", ".join(f"rank {rank} {_ended(ending)}" for rank, ending in enumerate(endings))
        _fail(f"{item.nodeid}: the ranks disagree: {each}")
    if kinds == {"failed"}:
        _fail(f"{item.nodeid}: {endings[0].reason}")
    if kinds == {"skipped"}:
        pytest.skip(endings[0].reason)
    if kinds == {"xfailed"}:
        pytest.xfail(endings[0].reason)


def _ran(item: pytest.Function) -> list[BodyEnding]:
    """How the body ended on each rank. A failure on ranks fails the test, or xfails it if the mark expects that error."""
    from pytest_fxbucket.pytest_plugin.pytest_internals import expect_no_other_failure, expected_failure
    from pytest_fxbucket.ranks.failure import RankFailure

    asked, fx = wanted(item), fx_session(item.config)
    backend, body, outputs = _backend(item, asked), _body(item, asked), dict[int, str]()
    problem: FxbucketError
    try:
        # on_output stores each rank's output when it comes, so that the report has it also if the job fails.
        with fx.progress.watching(item.nodeid):
            results = fx.pools.get(asked.world, backend).run(
                "pytest_fxbucket.pytest_plugin.distributed_test.job:run",
                [body] * asked.world,
                timeout_s=asked.timeout_s,
                paths=_roots(item),
                what=item.nodeid,
                on_output=outputs.__setitem__,
            )
            return cast("list[BodyEnding]", results)
    except FxbucketError as error:
        problem = error
    finally:
        _show(item, outputs)
    if not isinstance(problem, RankFailure):
        _fail(error_text(problem))
    # What failed because a peer had is left out. Of the rest the mark must expect all: which was first is chance.
    causes = [state for state in problem.states if state.outcome not in ("returned", "running") and not state.is_effect]
    reasons = [expected_failure(item, state.text, state.classes) for state in causes]
    if problem.kind == "raised" and reasons and None not in reasons:
        pytest.xfail(str(reasons[0]))
    expect_no_other_failure(item)  # what is raised here is pytest's Failed, which the mark may name, too
    _fail(*problem.lines(with_output=False), *_about_debuggers(item.config))


def _backend(item: pytest.Item, asked: MarkerRequest) -> str:
    """The back end to run on; too few GPUs for it skip the test, or fail it where GPUs are required."""
    if asked.backend != "auto" and not row_of(asked.backend).gpus:
        return asked.backend
    from pytest_fxbucket.ranks.machine import this_machine

    choice = choose(asked.backend, asked.world, this_machine())
    if choice.lacking and fx_session(item.config).options.require_gpus:
        _fail(f"{item.nodeid}: {choice.lacking}; --fxbucket-require-gpus makes that a failure")
    if choice.backend is None:
        pytest.skip(choice.lacking)
    return choice.backend


def _body(item: pytest.Function, asked: MarkerRequest) -> TestBody:
    from pytest_fxbucket.pytest_plugin.distributed_test.job import TestBody
    from pytest_fxbucket.pytest_plugin.distributed_test.modules import origins, own_conftest
    from pytest_fxbucket.pytest_plugin.pytest_internals import INI_NAMES, warning_filters
    from pytest_fxbucket.ranks.launch import import_path

    owner = item.cls.__qualname__.split(".") if item.cls is not None else ()
    with own_conftest(item):
        return TestBody(
            module=item.module.__name__,
            names=(*owner, item.originalname),
            origins=origins(item),
            sys_path=tuple(import_path()),
            packed=_item_given(item),
            mesh=asked.sizes,
            verbosity=item.config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS),
            ini={name: value for name in INI_NAMES if (value := _ini(item.config, name)) is not None},
            warning_filters=warning_filters(item),
            runs_xfail=item.config.option.runxfail,
        )


def _ini(config: pytest.Config, name: str) -> Any:
    try:
        return config.getini(name)
    except ValueError:  # this pytest has no such key
        return None


def _item_given(item: pytest.Function) -> bytes:
    """Arguments and the instance's attributes, packed; fails the test for one that cannot be sent, by name."""
    from pytest_fxbucket.ranks.wire import Unpicklable, pack_whole

    values = {name: _argument(name, item) for name in inspect.signature(item.obj).parameters if name in item.funcargs}
    state = dict(vars(item.instance)) if item.cls is not None else {}
    # Each is packed by itself only to name the one that cannot be. What is sent is packed as one, so that an object that
    # several of them hold stays one object.
    for name, value in (*values.items(), *((f"self.{name}", value) for name, value in state.items())):
        try:
            pack_whole(value)
        except Unpicklable as error:
            problem = f"{item.nodeid}: the value of {name} cannot be sent to the ranks ({error})"
        else:
            continue
        _fail(f"{problem}; make it in the body, or give what it is made of")
    return pack_whole((values, state))


def _argument(name: str, item: pytest.Function) -> object:
    value = item.funcargs[name]
    if name == "tmp_path" and isinstance(value, Path):
        return PerRank("folder", value)
    if name in _ALONE:
        text = f"the fixture {name} works in pytest's own process only, not on ranks; {_ALONE[name]}"
        _fail(f"{item.nodeid}: {text}")
    return value


def _roots(item: pytest.Item) -> list[str]:
    """Folders of the user's modules, which ranks load again once one has changed."""
    root = item.config.rootpath
    return [str(root)] if item.path.is_relative_to(root) else [str(item.path.parent), str(root)]


def _about_debuggers(config: pytest.Config) -> list[str]:
    return ["--pdb opens pytest's own process: the ranks of this test have ended"] if config.option.usepdb else []


def _show(item: pytest.Item, outputs: Mapping[int, str]) -> None:
    """Put each rank's output into the report; with -s on the screen."""
    for rank, text in sorted(outputs.items()):
        if item.config.option.capture == "no":
            print("".join(f"[rank {rank}] {line}\n" for line in text.splitlines()), end="", flush=True)
        else:
            item.add_report_section("call", f"stdout rank {rank}", text)


def _ended(ending: BodyEnding) -> str:
    return f"{ending.kind} ({ending.reason})" if ending.reason else ending.kind


def _fail(*lines: str) -> NoReturn:
    pytest.fail("\n".join(lines), pytrace=False)
