"""A step on a cluster that is not there: how long it takes, what of its communication is exposed, how much memory it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fxbucket.cost.cluster import Cluster, Link, cluster_named
    from pytest_fxbucket.simulate.simulator import simulate
    from pytest_fxbucket.simulate.timeline import Timeline

__all__ = ["Cluster", "Link", "Timeline", "cluster_named", "simulate"]
_HOME = {
    "Cluster": "cost.cluster",
    "Link": "cost.cluster",
    "Timeline": "simulate.timeline",
    "cluster_named": "cost.cluster",
    "simulate": "simulate.simulator",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"pytest_fxbucket.{_HOME[name]}"), name)
