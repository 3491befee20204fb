"""``[cluster]``: the machines that a step is simulated on; limits of the checks ``overlap`` and ``memory``.

A preset file has the keys of ``[cluster]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.rules import (
    Metadata,
    above_zero,
    callable_name,
    number,
    number_that,
    rule_for,
    switch,
    table_of,
    whole,
    wrong,
)
from pytest_fxbucket.words import nearest, one_or_other, show

PRESETS = ("h100-sxm", "h200-sxm", "b200", "a100-80g", "cpu-gloo")
"""Names of built-in presets: each is a file of that name in ``pytest_fxbucket/cost/clusters``."""
DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
"""dtypes in which matrix products are computed."""


@rule_for(f'{one_or_other([show(one) for one in PRESETS])}, or a file such as "ours.toml"', str)
def preset(value: str, where: str, expects: str) -> object:
    """Take the name of a built-in preset, or the path of a TOML file as text; no file is opened."""
    if value not in PRESETS and not value.endswith(".toml"):
        raise PlanError(f"{wrong(where, expects, value)}{nearest(value, list(PRESETS))}")
    return value


def some_share(doc: str) -> Metadata:
    """Take a number above 0 and up to 1, as a float."""
    return number_that(doc, "a number above 0 and at most 1", lambda found: 0 < found <= 1)


@rule_for("a table such as { bfloat16 = 989, float32 = 67 }", Mapping)
def rates(value: Mapping[str, object], where: str, expects: str) -> object:
    """Take a table of dtype = number above 0, as a dict."""
    for name in value:
        if name not in DTYPES:
            known = nearest(str(name), list(DTYPES)) or f"; known are {', '.join(DTYPES)}"
            raise PlanError(f'{where} has no dtype "{name}"{known}')
    one = above_zero("")["rule"]
    return {name: one.read(rate, f"{where}.{name}") for name, rate in value.items()}


@dataclass(frozen=True, slots=True)
class Link:
    """``[cluster] within`` or ``between``: how a device reaches others."""

    bandwidth: float | None = field(
        default=None, metadata=above_zero("GB/s, of 10**9 bytes, that a device sends while it receives as much")
    )
    latency_us: float | None = field(default=None, metadata=number("microseconds of one hop", least=0))


@dataclass(frozen=True, slots=True)
class Cluster:
    """``[cluster]``: a preset, and figures that differ from it."""

    preset: str | None = field(
        default=None,
        metadata=preset(
            "where figures are from that the table does not have: a built-in one, or a file of keys as these, its path from "
            "the plan's folder; without it all must be here that has no default"
        ),
    )
    tflops: Mapping[str, float] = field(
        default_factory=dict,
        metadata=rates(
            "10**12 floating point operations a second of dense products, by dtype; `float32` counts for what is not there"
        ),
    )
    memory_bandwidth: float | None = field(
        default=None, metadata=above_zero("GB/s, of 10**9 bytes, between a device and its own memory")
    )
    memory_gb: float | None = field(default=None, metadata=above_zero("memory of a device in 2**30 bytes"))
    devices_per_node: int | None = field(default=None, metadata=whole("devices of a node; ranks fill nodes in order", least=1))
    within: Link | None = field(default=None, metadata=table_of("the link between devices of a node", Link))
    between: Link | None = field(default=None, metadata=table_of("the link between nodes, for each device", Link))
    compute_efficiency: float | None = field(default=None, metadata=some_share("part of `tflops` that products get, else 1"))
    memory_efficiency: float | None = field(default=None, metadata=some_share("part of `memory_bandwidth` that is had, else 1"))
    network_efficiency: float | None = field(
        default=None, metadata=some_share("part of the bandwidth of both links that collectives get, else 1")
    )
    launch_us: float | None = field(
        default=None, metadata=number("microseconds that the host takes to call an operator, else 0", least=0)
    )
    view_us: float | None = field(
        default=None,
        metadata=number("microseconds that the host takes to call an operator that runs no kernel, else 0", least=0),
    )
    enqueue_us: float | None = field(
        default=None,
        metadata=number("microseconds that the host takes to launch a collective, beyond `launch_us`, else 0", least=0),
    )
    enqueue_us_per_mb: float | None = field(
        default=None,
        metadata=number("microseconds more for each 10**6 bytes of it, as where the host copies them, else 0", least=0),
    )
    wait_us: float | None = field(
        default=None,
        metadata=number("microseconds that the host takes to wait for what is there, else 0", least=0),
    )
    kernel_us: float | None = field(
        default=None, metadata=number("microseconds that any kernel takes, whatever it computes, else 0", least=0)
    )
    collective_us: float | None = field(
        default=None, metadata=number("microseconds that any collective takes, whatever it carries, else 0", least=0)
    )
    blocking: bool | None = field(
        default=None,
        metadata=switch("the host itself computes, as on a CPU: it calls nothing before what it called is done, else false"),
    )
    allocation_bytes: int | None = field(
        default=None, metadata=whole("bytes that an allocation is a multiple of, else 1", least=1)
    )
    cost: str | None = field(
        default=None,
        metadata=callable_name(
            "an estimate of your own: `callable(node) -> seconds` of an `fx.Node`; where it gives None, the built-in one counts"
        ),
    )


NEEDED = ("tflops", "memory_bandwidth", "memory_gb", "devices_per_node", "within", "between")
"""Keys without a default: the table or its preset must have them."""


def lacking(table: Cluster) -> str:
    """The first figure without a default that ``table`` lacks, as ``within.bandwidth``; empty if it has all."""
    for name in NEEDED:
        # Not ``is None``: an empty table of tflops has no figure, either.
        if not getattr(table, name):
            return name
    # float32 stands for every dtype that has no figure of its own.
    if "float32" not in table.tflops:
        return "tflops.float32"
    for name in ("within", "between"):
        link: Link = getattr(table, name)
        if part := next((key for key in ("bandwidth", "latency_us") if getattr(link, key) is None), ""):
            return f"{name}.{part}"
    return ""


@dataclass(frozen=True, slots=True)
class ExposureLimit:
    """``[checks] overlap``, of one direction: how much of its communication may be exposed."""

    exposed_max_ms: float | None = field(
        default=None, metadata=number("milliseconds of a simulated step, at most, that waits hold up compute", least=0)
    )
    hidden_min: float | None = field(
        default=None,
        metadata=number_that(
            "part of all collectives, at least, that hold up nothing",
            "a number from 0 and at most 1",
            lambda found: 0 <= found <= 1,
        ),
    )


@dataclass(frozen=True, slots=True)
class OverlapLimits(ExposureLimit):
    """``[checks] overlap``: limits for the whole step, and for each direction by itself."""

    forward: ExposureLimit | None = field(
        default=None, metadata=table_of("the same limits for what forward launches", ExposureLimit)
    )
    backward: ExposureLimit | None = field(
        default=None, metadata=table_of("the same limits for what backward launches", ExposureLimit)
    )
    optimizer: ExposureLimit | None = field(
        default=None, metadata=table_of("the same limits for what updates launch", ExposureLimit)
    )

    def limits(self) -> dict[str, ExposureLimit]:
        """Limits by direction, with the whole step under an empty name; directions without a limit are left out."""
        found = {"": self, "forward": self.forward, "backward": self.backward, "optimizer": self.optimizer}
        return {
            name: one
            for name, one in found.items()
            if one is not None and (one.exposed_max_ms is not None or one.hidden_min is not None)
        }


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """``[checks] memory``: how much the step may take."""

    peak_max_gb: float | None = field(
        default=None, metadata=above_zero("most that a rank of the simulated step holds at once, in 2**30 bytes")
    )
    increase_max: float | None = field(
        default=None,
        metadata=number("most that it holds above the unbucketed step, as a part of that one: 0.1 for 10 %", least=0),
    )
