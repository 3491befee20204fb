"""What of a process's state a rank may take for its own, to be changed when the process goes on as another rank.

Thread-local state (grad mode, autocast, the default device) needs no change, since each rank has a thread. Modules, and what
they keep in their globals, are shared.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pytest_fxbucket.compat.threads import Groups, put_groups, take_groups


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Process groups, random states, torch's settings, directory, environment and import path."""

    groups: Groups
    generators: tuple[torch.Tensor, ...]
    python_random: object
    numpy_random: object
    settings: tuple[Any, ...]
    cwd: str
    environ: dict[str, str]
    path: list[str]
    excepthook: Callable[..., object]
    """Torch hangs one before it with each default group."""

    @classmethod
    def take(cls) -> Surroundings:
        """Those of this process as they are now."""
        numpy_random = sys.modules.get("numpy.random")
        return cls(
            take_groups(),
            tuple(generator.get_state() for generator in _generators()),
            random.getstate(),
            numpy_random.get_state() if numpy_random is not None else None,
            _settings(),
            _cwd(),
            dict(os.environ),
            list(sys.path),
            sys.excepthook,
        )

    def put_back(self) -> None:
        """Let the process have these again."""
        put_groups(self.groups)
        # A device that came into use since then keeps its random state.
        for generator, state in zip(_generators(), self.generators, strict=False):
            generator.set_state(state)
        random.setstate(self.python_random)  # type: ignore[arg-type]
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None and self.numpy_random is not None:
            numpy_random.set_state(self.numpy_random)
        if self.settings != _settings():
            _set(*self.settings)
        if self.cwd and self.cwd != _cwd():
            with contextlib.suppress(OSError):  # it may be gone by now
                os.chdir(self.cwd)
        if self.environ != dict(os.environ):
            os.environ.clear()
            os.environ.update(self.environ)
        sys.path[:] = self.path
        sys.excepthook = self.excepthook


def _generators() -> tuple[torch.Generator, ...]:
    devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return (torch.default_generator, *devices)


def _settings() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.get_deterministic_debug_mode(),
        torch.is_anomaly_enabled(),
    )


def _set(dtype: torch.dtype, precision: str, deterministic: int, is_anomaly: bool) -> None:
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.set_deterministic_debug_mode(deterministic)
    torch.set_anomaly_enabled(is_anomaly)


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""
