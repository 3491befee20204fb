"""Says in one sentence whose code failed: the user's own frame, not torch's and not ours."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pytest_fxbucket.compat.tracing import refused_eagerly, untraceable
from pytest_fxbucket.errors import CaptureError, FxbucketError, text_of

_OURS = Path(__file__).resolve().parent


@contextmanager
def naming_user_frame(doing: Callable[[], str], hint: Callable[[Exception], str] = lambda _: "") -> Iterator[None]:
    """Turn any exception of the block into a :class:`CaptureError` that names what was being done, and the user's frame.

    ``hint`` ends the sentence.
    """
    try:
        yield
    except (FxbucketError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # the user's code may end its process, or skip a test
        if is_timeout(error):
            raise
        more = hint(error) if isinstance(error, Exception) else ""
        text = untraceable(error) or refused_eagerly(error) or f"{type(error).__name__}: {text_of(error)[:400]}"
        raise CaptureError(
            f"{doing()} failed{at_user_frame(error)}: {text.rstrip('.') + '; ' + more if more else text}"
        ) from error


def is_timeout(error: BaseException) -> bool:
    """Whether pytest-timeout raised it, in the midst of whatever was being done."""
    return any(frame.f_globals.get("__name__") == "pytest_timeout" for frame, _ in traceback.walk_tb(error.__traceback__))


def user_frame(error: BaseException) -> str:
    """``file:line in function`` of the innermost frame that is neither torch's, the standard library's, pytest's nor ours."""
    import torch

    foreign, library = [Path(torch.__file__).parent, _OURS], Path(traceback.__file__).parent
    if pytest := sys.modules.get("_pytest"):  # as of pytest.skip in the user's code
        foreign += map(Path, pytest.__path__)
    if timeout := sys.modules.get("pytest_timeout"):
        foreign.append(Path(str(timeout.__file__)))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        # Outside a virtual environment what was installed lies below the standard library.
        if path.is_relative_to(library) and not {"site-packages", "dist-packages"}.intersection(path.parts):
            continue
        if path.is_file() and not any(path.is_relative_to(root) for root in foreign):
            return f"{_shown(path)}:{frame.lineno} in {frame.name}"
    return ""


def at_user_frame(error: BaseException) -> str:
    """`` at`` and :func:`user_frame`, for the middle of a sentence; empty if there is none."""
    frame = user_frame(error)
    return f" at {frame}" if frame else ""


def _shown(path: Path) -> str:
    """``path`` from the current directory if it is below it, else from the folder that it is imported from."""
    path = path.resolve()
    imported = {Path(entry).resolve() for entry in sys.path if entry}
    # The deepest folder of those that hold it gives the shortest path, as it is written in imports.
    for root in (Path.cwd(), *sorted(imported, key=lambda root: len(root.parts), reverse=True)):
        if path.is_relative_to(root) and root != Path(root.anchor):
            return path.relative_to(root).as_posix()
    return path.name
