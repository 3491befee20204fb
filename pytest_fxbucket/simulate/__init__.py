"""A step on a cluster that is not there: how long it takes, what of its communication is exposed, how much memory it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fxbucket.first_use import on_first_use

if TYPE_CHECKING:
    from pytest_fxbucket.cost.cluster import Cluster, Link, cluster_named
    from pytest_fxbucket.simulate.simulator import simulate
    from pytest_fxbucket.simulate.timeline import Timeline

__all__ = ["Cluster", "Link", "Timeline", "cluster_named", "simulate"]
__getattr__ = on_first_use(
    __name__,
    {
        "cost.cluster": ["Cluster", "Link", "cluster_named"],
        "simulate.simulator": ["simulate"],
        "simulate.timeline": ["Timeline"],
    },
)
