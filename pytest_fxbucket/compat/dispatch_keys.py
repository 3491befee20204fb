"""Which of torch's layers a call goes through (``torch._C``, in torch 2.11 to 2.15)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import TypeVar

import torch

Result = TypeVar("Result")
_KEYS = torch._C.DispatchKey


def above_autograd(function: Callable[..., Result]) -> Callable[..., Result]:
    """``function`` called as if outside of every operator: autograd records what it computes.

    A dispatch mode is called below autograd, also for an operator that is made of others.
    """

    @wraps(function)
    def called(*args: object, **kwargs: object) -> Result:
        now = torch._C._dispatch_tls_local_exclude_set()
        if not now.has(_KEYS.AutogradOther):
            return function(*args, **kwargs)
        # Excluded keys are those of a thread outside of operators, except for Python's: the same modes as now see the calls.
        seen = torch._C.DispatchKeySet(_KEYS.Python).add(_KEYS.PythonTLSSnapshot)
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), _outside() | (now & seen)):
            return function(*args, **kwargs)

    return called


@cache
def _outside() -> torch._C.DispatchKeySet:
    """Dispatch keys that a thread excludes outside of every operator, asked of a new thread."""
    found: list[torch._C.DispatchKeySet] = []
    thread = threading.Thread(target=lambda: found.append(torch._C._dispatch_tls_local_exclude_set()))
    thread.start()
    thread.join()
    return found[0]
