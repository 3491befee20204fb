"""Which test files with goldens of their own a run holds whole: only then does a golden that no test asked for say something.

The process that collects knows, and it is a worker's under pytest-xdist: it tells the controller when it ends. A worker that
dies tells nothing; the others collected the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_fxbucket.session import FxSession

OUTPUT = "fxbucket_whole_files"


class WholeFiles:
    """Hooks of the process that collects."""

    def __init__(self, fx: FxSession) -> None:
        self._fx = fx
        self._ids: dict[Path, list[str]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> Generator[None, object, object]:
        """Keep the node ids of each file that has goldens and of which no test was taken away, by whatever means."""
        before = list(items)
        result = yield
        left = set(map(id, items))
        partial = {item.path for item in before if id(item) not in left or _depends_on_options(item)}
        is_choice = config.getoption("lf", False)
        by_file: defaultdict[Path, list[str]] = defaultdict(list)
        for item in items:
            by_file[item.path].append(item.nodeid)
        for path, ids in by_file.items():
            if not is_choice and path not in partial and self._has_goldens(path) and not _is_part_named(config, path):
                self._ids[path] = ids
        self._fx.whole_files = self._ids
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Tell the controller, if this is a worker."""
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[OUTPUT] = {str(path): ids for path, ids in self._ids.items()}

    def _has_goldens(self, path: Path) -> bool:
        options = self._fx.options
        if path.suffix != ".py" or not path.is_relative_to(options.rootdir):
            return False
        return (options.golden_dir / path.relative_to(options.rootdir).with_suffix("")).is_dir()


def ran_whole(path: Path, ids_of: Mapping[Path, Iterable[str]], outcomes: Mapping[str, str]) -> bool:
    """Say whether each test of the file `path` ran to its end; `outcomes`: node id -> that of its call."""
    ids = ids_of.get(path)
    return ids is not None and all(outcomes.get(name) == "passed" for name in ids)


def _depends_on_options(item: pytest.Item) -> bool:
    """Say whether another command line would have given more tests beside this: those over the named plans."""
    return "fxbucket_plan" in getattr(item, "fixturenames", ()) and item.get_closest_marker("fxbucket_plan") is None


def _is_part_named(config: pytest.Config, path: Path) -> bool:
    """Say whether an argument names some tests of the file alone."""
    named = [arg.partition("::")[0] for arg in config.args if "::" in arg]
    files = [config.invocation_params.dir / name for name in named]
    # With --pyargs it is a module's name, so that any file may be meant.
    return any(not file.exists() or file.samefile(path) for file in files)
