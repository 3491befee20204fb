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
    """``function`` as if it was called outside of every operator: what it computes has gradients.

    A dispatch mode calls an operator below autograd, also one that is made of others.
    """

    @wraps(function)
    def called(*args: object, **kwargs: object) -> Result:
        now = torch._C._dispatch_tls_local_exclude_set()
        if not now.has(_KEYS.AutogradOther):
            return function(*args, **kwargs)
        seen = torch._C.DispatchKeySet(_KEYS.Python).add(_KEYS.PythonTLSSnapshot)  # modes see what they saw
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), _outside() | (now & seen)):
            return function(*args, **kwargs)

    return called


@cache
def _outside() -> torch._C.DispatchKeySet:
    """What a thread leaves out that is in no operator."""
    found: list[torch._C.DispatchKeySet] = []
    thread = threading.Thread(target=lambda: found.append(torch._C._dispatch_tls_local_exclude_set()))
    thread.start()
    thread.join()
    return found[0]
