"""What code leaves behind in its process: random states, settings, paths, environment; taken, and put back."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What all threads of this process share."""

    generators: tuple[Any, ...] | None
    """States of torch's random generators, the CPU's first; None while nobody has imported torch."""
    settings: dict[str, Any] | None
    """Torch's settings by name; None while nobody has imported torch."""
    python_random: Any
    numpy_random: Any
    cwd: str
    environ: dict[str, str]
    path: list[str]
    excepthook: Callable[..., object]
    """Torch puts a hook of its own in front of it with each default group."""

    @classmethod
    def take(cls) -> ProcessState:
        """The state of this process now."""
        numpy_random = sys.modules.get("numpy.random")
        settings = _settings()
        return cls(
            tuple(generator.get_state() for generator in _generators()) if settings else None,
            settings.values_of(settings.OF_PROCESS) if settings else None,
            random.getstate(),
            numpy_random.get_state() if numpy_random is not None else None,
            _cwd(),
            dict(os.environ),
            list(sys.path),
            sys.excepthook,
        )

    def has_drawn(self) -> bool:
        """Whether anybody has drawn random numbers since, in this process, or set what they begin with."""
        now = ProcessState.take()
        if self.python_random != now.python_random:
            return True
        # NumPy's state holds an array, for which == gives no single answer. Who imports it since has drawn nothing yet.
        if self.numpy_random is not None and repr(self.numpy_random) != repr(now.numpy_random):
            return True
        pairs = zip(self.generators or (), now.generators or (), strict=False)
        return any(not bool((one == other).all()) for one, other in pairs)

    def put_back(self) -> None:
        """Give the process this state again."""
        if settings := _settings():
            settings.put(settings.OF_PROCESS, self.settings)
            if self.generators is None:
                import torch

                torch.manual_seed(0)
            # A device that came into use since then keeps its random state.
            for generator, state in zip(_generators(), self.generators or (), strict=False):
                generator.set_state(state)
        random.setstate(self.python_random)
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None and self.numpy_random is not None:
            numpy_random.set_state(self.numpy_random)
        if self.cwd and self.cwd != _cwd():
            with contextlib.suppress(OSError):  # it may be gone by now
                os.chdir(self.cwd)
        if self.environ != dict(os.environ):
            os.environ.clear()
            os.environ.update(self.environ)
        sys.path[:] = self.path
        sys.excepthook = self.excepthook


_module_of_warnings: Any = warnings  # for the one function of it that has no public name


@dataclass(frozen=True, slots=True)
class WarningFilters:
    """What ``warnings.catch_warnings`` keeps: which warnings are shown or raised, and by what."""

    filters: Any
    showing: tuple[Any, Any]

    @classmethod
    def take(cls) -> WarningFilters:
        """Those of this process now."""
        return cls(warnings.filters, (warnings.showwarning, _module_of_warnings._showwarnmsg_impl))

    def put_back(self) -> None:
        """Let the process have these again."""
        if warnings.filters is not self.filters:
            # What each module remembers of shown warnings counts no more: this is what tells them.
            warnings.filters = []
            warnings.resetwarnings()
            warnings.filters = self.filters
        warnings.showwarning, _module_of_warnings._showwarnmsg_impl = self.showing


def umask() -> int:
    """The bits that new files lack."""
    # It can be read only by setting it.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def torch_settings_now() -> dict[str, Any]:
    """Torch's settings of process and thread, by name; none while nobody has imported torch."""
    settings = _settings()
    return settings.values_of((*settings.OF_PROCESS, *settings.OF_THREAD)) if settings else {}


def put_torch_settings(values: dict[str, Any]) -> None:
    """Set those of torch's settings that ``values`` names."""
    if values and (settings := _settings()):
        settings.put((*settings.OF_PROCESS, *settings.OF_THREAD), values)


def reset() -> None:
    """Let random states and torch's settings, also those of this thread, be those of a new process; seeds are 0.

    Imports no torch: without it there is nothing to reset.
    """
    if settings := _settings():
        import torch

        settings.put((*settings.OF_PROCESS, *settings.OF_THREAD))
        torch.manual_seed(0)
    random.seed(0)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(0)


@contextlib.contextmanager
def fresh_state() -> Iterator[None]:
    """Run the user's code in the block as in a new process, and restore the state of before, whatever the block left.

    A plan's step must not depend on what ran before it, here or in the ranks.
    """
    state, streams, limit = ProcessState.take(), (sys.stdin, sys.stdout, sys.stderr), sys.getrecursionlimit()
    settings = _settings()
    of_thread = settings.values_of(settings.OF_THREAD) if settings else None
    threads = _threads()
    mask = umask()
    reset()
    try:
        with warnings.catch_warnings(), _no_alarm():
            yield
    finally:
        state.put_back()
        sys.stdin, sys.stdout, sys.stderr = streams
        sys.setrecursionlimit(limit)
        os.umask(mask)
        if settings := _settings():
            settings.put(settings.OF_THREAD, of_thread)
        if threads is not None and threads != _threads():
            sys.modules["torch"].set_num_threads(threads)


@contextlib.contextmanager
def _no_alarm() -> Iterator[None]:
    """Take away an alarm and a handler that the block left: it would strike later, and end the process or another item."""
    import signal

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, was_set = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    try:
        yield
    finally:
        # A timer that ran before the block, as pytest-timeout's may, is not stopped.
        if not was_set:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if before is not None and signal.getsignal(signal.SIGALRM) is not before:
            signal.signal(signal.SIGALRM, before)


def _settings() -> ModuleType | Any:
    """The module of torch's settings; None while nobody has imported torch, or somebody is about to."""
    # Torch imports some packages of others while it is imported itself, and the user's may be among them.
    torch = sys.modules.get("torch")
    if torch is None or getattr(torch.__spec__, "_initializing", False):
        return None
    from pytest_fxbucket.process import torch_settings

    return torch_settings


def _generators() -> tuple[Any, ...]:
    import torch

    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return (torch.default_generator, *devices)


def _threads() -> int | None:
    return int(sys.modules["torch"].get_num_threads()) if "torch" in sys.modules else None


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""
