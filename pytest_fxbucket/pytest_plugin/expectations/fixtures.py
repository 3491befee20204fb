"""From a test to its golden book and its expectation, and from those to the test's report."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fxbucket.pytest_plugin.session import fx_session

if TYPE_CHECKING:
    from pytest_fxbucket.artifacts import Folder
    from pytest_fxbucket.pytest_plugin.expectations.inline import Expectation
    from pytest_fxbucket.pytest_plugin.expectations.named import GoldenBook
    from pytest_fxbucket.run import PlanRun

_BOOK: pytest.StashKey[GoldenBook] = pytest.StashKey()
_EDITS: pytest.StashKey[list[Any]] = pytest.StashKey()
EXPECT = "fxbucket_expect"
# What pytest shows of an explanation without -vv: https://docs.pytest.org/en/stable/reference/reference.html#truncation
_SHOWN_LINES, _SHOWN_CHARACTERS = 8, 640


def book_of(request: pytest.FixtureRequest) -> GoldenBook:
    """The goldens of the test that asks."""
    from pytest_fxbucket.golden.store import GoldenStore
    from pytest_fxbucket.pytest_plugin.expectations.named import GoldenBook

    item, fx = request.node, fx_session(request.config)
    options = fx.options
    book = GoldenBook(
        store=GoldenStore(options.golden_dir, options.rootdir, tuple(_words(item))),
        file=item.path,
        mode=options.accept,
        accept=fx.accepted.add,
        compared=fx.compared,
        run=_plan_in_use(request),
        folder=lambda name: _folder(item, name),
    )
    item.stash[_BOOK] = book
    return book


def expectation_of(request: pytest.FixtureRequest) -> Expectation:
    """The inline expectations of the test that asks."""
    from pytest_fxbucket.pytest_plugin.expectations.inline import Expectation

    item, fx = request.node, fx_session(request.config)
    options = fx.options
    return Expectation(
        rootdir=options.rootdir,
        test=item.nodeid,
        mode=options.accept,
        command=lambda mode: shlex.join(["pytest", *_words(item), f"--fxbucket-accept={mode}"]),
        run=_plan_in_use(request),
        sources=fx.sources,
        folder=_folder(item, item.nodeid.rpartition("::")[2]),
        edits=item.stash.setdefault(_EDITS, []),
    )


def told_by(item: pytest.Item, report: pytest.TestReport) -> dict[str, Any]:
    """What the process that writes is told of the item's phase, as plain data; the report gets what pytest did not show."""
    told: dict[str, Any] = {}
    if edits := item.stash.get(_EDITS, None):
        told["edits"] = [*edits]
        edits.clear()
    book = item.stash.get(_BOOK, None)
    if book is None:
        return told
    if report.when == "call":
        _show(item, report, book)
    if book.texts:
        told["texts"] = [*book.texts]
        book.texts.clear()
    return told


def _show(item: pytest.Item, report: pytest.TestReport, book: GoldenBook) -> None:
    if report.failed and item.config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS) < 2:
        for lines in dict.fromkeys(book.hidden):
            if len(lines) > _SHOWN_LINES or sum(map(len, lines)) > _SHOWN_CHARACTERS:
                report.sections.append((lines[0], "\n".join(lines[1:])))
    if report.passed and book.unread and not hasattr(report, "wasxfail"):
        # ``assert not graph == golden``, or a comparison that nobody asserts: nothing was compared, so nothing has passed.
        report.outcome = "failed"
        report.longrepr = book.unread[0]


def _plan_in_use(request: pytest.FixtureRequest) -> Callable[[], PlanRun | None]:
    def run() -> PlanRun | None:
        used = "fxbucket_plan" in request.fixturenames
        found: PlanRun | None = request.getfixturevalue("fxbucket_run") if used else None
        return found

    return run


def _folder(item: pytest.Item, name: str) -> Folder:
    from pytest_fxbucket.artifacts import Folder

    fx = fx_session(item.config)
    log_of = fx.torchrun.log_name if fx.torchrun is not None else None
    return Folder(fx.options.rootdir / ".fxbucket", item.nodeid.partition("::")[0], name, log_of)


def _words(item: pytest.Item) -> list[str]:
    """Arguments of pytest that run ``item``: its node id, and the plan that the option gave it."""
    from pytest_fxbucket.pytest_plugin.items import PlanRef

    words = [item.nodeid]
    callspec = getattr(item, "callspec", None)
    ref = callspec.params.get("fxbucket_plan") if callspec is not None else None
    options = fx_session(item.config).options
    if isinstance(ref, PlanRef) and ref.path in options.plans:
        words.append(f"--fxbucket-plans={options.shown(ref.path)}")
    return words
