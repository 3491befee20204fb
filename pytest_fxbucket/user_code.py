"""Around all that a plan calls: its factories, passes and transformations, in pytest's process and in the commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pytest_fxbucket.compat.trace import quiet_structured_log
from pytest_fxbucket.errors import FxbucketError, named
from pytest_fxbucket.plan.factories import first_on_path
from pytest_fxbucket.process_state import fresh_state


@contextmanager
def user_code(folders: Sequence[Path]) -> Iterator[None]:
    """Run the block with ``folders`` first on the path, as in a new process, and have all as it was behind it.

    Raises :class:`FxbucketError` where the code would have ended the process or skipped a test.
    """
    try:
        with first_on_path(folders), fresh_state(), quiet_structured_log():
            yield
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise FxbucketError(f"a callable of the plan raised {named(error)}; it must return, or raise an error") from error
