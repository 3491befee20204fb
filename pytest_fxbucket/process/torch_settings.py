"""Torch's global settings that change how a step is traced or what it computes: what they are, and what a new process has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pytest_fxbucket.compat.modules import default_device, module_hooks, set_module_hooks


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, as it is read and set, and as a new process has it."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any]
    fresh: Any


Values = dict[str, Any]
"""Settings by their names."""


def values_of(settings: Iterable[Setting]) -> Values:
    """What each of ``settings`` is now."""
    return {one.name: one.get() for one in settings}


def put(settings: Iterable[Setting], values: Values | None = None) -> None:
    """Set each of ``settings`` that differs from ``values``, or for None from what a new process has."""
    for one in settings:
        wanted = one.fresh if values is None else values.get(one.name, one.get())
        if one.get() != wanted:
            one.set(wanted)


_DETERMINISTIC, _FILL = torch.utils.deterministic, "fill_uninitialized_memory"
_FUTURE = torch.__future__
OF_PROCESS = (
    Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    Setting("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    # Not by use_deterministic_algorithms, which does the same and imports inductor.
    Setting("deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
    Setting("filling of empty tensors", partial(getattr, _DETERMINISTIC, _FILL), partial(setattr, _DETERMINISTIC, _FILL), True),
    Setting(
        "anomaly mode",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
        (False, True),
    ),
    Setting("fast path of attention", torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, True),
    Setting(
        "swapping of converted parameters",
        _FUTURE.get_swap_module_params_on_conversion,
        _FUTURE.set_swap_module_params_on_conversion,
        False,
    ),
    Setting(
        "overwriting of converted parameters",
        _FUTURE.get_overwrite_module_params_on_conversion,
        _FUTURE.set_overwrite_module_params_on_conversion,
        False,
    ),
    Setting("hooks of all modules", module_hooks, set_module_hooks, module_hooks()),
    # Which kernels scaled_dot_product_attention may take: each leaves another graph.
    *(
        Setting(
            f"{kind} attention",
            getattr(torch.backends.cuda, f"{kind}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{kind}_sdp"),
            True,
        )
        for kind in ("flash", "mem_efficient", "math", "cudnn")
    ),
)
"""Those that all threads share."""
OF_THREAD = (
    Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled, True),
    Setting("default device", default_device, torch.set_default_device, None),
    *(
        Setting(
            f"autocast of {kind}", partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind), False
        )
        for kind in ("cpu", "cuda")
    ),
    *(
        Setting(
            f"dtype of autocast of {kind}", partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind), to
        )
        for kind, to in (("cpu", torch.bfloat16), ("cuda", torch.float16))
    ),
)
"""Those that each thread has for itself."""


def add_in_one_order() -> None:
    """Have kernels add in the same order in each run, however many threads they have, until settings are put back.

    On the CPU ``index_put_`` adds in the order in which its threads come, and so does the backward of an index.
    """
    if torch.get_deterministic_debug_mode() == 0:  # on a GPU other orders are an error by now
        torch.set_deterministic_debug_mode("warn")
        setattr(_DETERMINISTIC, _FILL, False)  # what nobody writes is to differ still
