"""Around all that a plan calls: its factories, passes and transformations, in pytest's process and in the commands."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pytest_fxbucket.compat.tracing import quiet_structured_log
from pytest_fxbucket.errors import FxbucketError, named
from pytest_fxbucket.plan.factories import first_on_path
from pytest_fxbucket.process.state import fresh_state
from pytest_fxbucket.user_frame import is_timeout


@contextmanager
def user_code(folders: Sequence[Path]) -> Iterator[None]:
    """Run the block with ``folders`` first on the path, as in a new process, and have all as it was behind it.

    Raises :class:`FxbucketError` where the code would have ended the process or skipped a test.
    """
    try:
        with first_on_path(folders), fresh_state(), quiet_structured_log(), _not_left():
            yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        # What is left ends a process or a test: SystemExit, pytest.skip, pytest.fail, and HardExit below.
        if is_timeout(error):
            raise
        raise FxbucketError(f"a callable of the plan raised {named(error)}; it must return, or raise an error") from error


class HardExit(BaseException):
    """What ``os._exit`` raises here: no handler of the code's own takes it for an error."""


@contextmanager
def _not_left() -> Iterator[None]:
    """No ``os._exit``: pytest would end at once, with the code's own status. Processes that the code forks may."""
    process, leave = os.getpid(), os._exit

    def refuse(status: int) -> None:
        if os.getpid() != process:
            leave(status)
        raise HardExit(f"os._exit({status})")

    os._exit = refuse  # type: ignore[assignment]  # replaced for a while
    try:
        yield
    finally:
        os._exit = leave
