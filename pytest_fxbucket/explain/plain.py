"""The report of one graph as plain data: the ``graphs`` of ``fxbucket explain --json``, as the docs describe them."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fxbucket.explain.told import Graph


def graph_as_data(graph: Graph) -> dict[str, Any]:
    """The report, with process groups by mesh dimension, and where in a rank's part of a launch each member begins."""
    data = graph.report.to_dict(graph.dims)
    for plain, bucket in zip(data["buckets"], graph.report.buckets, strict=True):
        read = graph.members.get(bucket.launch, ())
        known = len(read) == len(bucket.members)
        plain["label"] = graph.labels[bucket.launch]
        plain["group"] = graph.dims.get(bucket.group, "unknown group")
        plain["offsets"] = [member.offset for member in read] if known else None
    data["updates"] = [asdict(one) for one in graph.fed]
    return data
