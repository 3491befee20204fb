"""Says in one sentence whose code failed: the user's own frame, not torch's and not ours."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pytest_fxbucket.compat.trace import untraceable
from pytest_fxbucket.errors import CaptureError, FxbucketError

_OURS = Path(__file__).resolve().parents[1]


@contextmanager
def blamed(doing: Callable[[], str]) -> Iterator[None]:
    """Turn any exception of the block into a :class:`CaptureError` that names what was being done, and the user's frame."""
    try:
        yield
    except FxbucketError:
        raise
    except Exception as error:
        frame = user_frame(error)
        where = f" at {frame}" if frame else ""
        text = untraceable(error) or f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        raise CaptureError(f"{doing()} failed{where}: {text}") from error


def user_frame(error: BaseException) -> str:
    """``file:line in function`` of the innermost frame that is neither torch's, the standard library's nor ours."""
    import torch

    foreign = (Path(torch.__file__).parent, _OURS, Path(traceback.__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(root) for root in foreign):
            return f"{path.name}:{frame.lineno} in {frame.name}"
    return ""
