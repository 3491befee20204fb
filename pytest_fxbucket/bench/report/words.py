"""Numbers and names as the pages show them."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fxbucket.bench.record import Record

NOTHING = "-"
"""Of what was not measured."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def escaped(text: object) -> str:
    """``text`` as HTML shows it; plotly's labels, which know tags and entities too, take the same."""
    return html.escape(str(text), quote=True)


def ms(seconds: float | None) -> str:
    """``1.234 ms``; a dash of what was not measured."""
    return NOTHING if seconds is None else f"{seconds * 1e3:,.3f} ms"


def size(count: float | None) -> str:
    """``1.5 MiB``; a dash of what is not known."""
    if count is None:
        return NOTHING
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def commit_text(record: Record) -> str:
    """``1a2b3c4d5``, ``1a2b3c4d5 dirty``, ``no commit``."""
    return (record.commit[:9] if record.commit else "no commit") + (" dirty" if record.dirty else "")


def machine_text(machine: Any) -> str:
    """``AMD EPYC 9B14, 2 cores, x86_64 Linux``; alike GPUs counted."""
    gpus = [f"{machine['gpus'].count(gpu)} x {gpu}" for gpu in dict.fromkeys(machine["gpus"])]
    cores = f"{machine['cores']} core{'' if machine['cores'] == 1 else 's'}"
    return ", ".join([*gpus, machine["cpu"], cores, f"{machine['arch']} {machine['system']}"])


def span_name(label: str, direction: str) -> str:
    """What compute is of: its module's FQN, or what it belongs to where no module is known."""
    return label or ("the optimizer" if direction == "optimizer" else "outside of any module")
