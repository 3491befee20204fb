"""What is sent is cast behind the wait instead of before the launch: reduced in bfloat16, or gathered in float32."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pytest_fxbucket.mutate.launches import plain_launches, sent_otherwise
from pytest_fxbucket.mutate.operator import BrokenGraph, SeenGraph, Site
from pytest_fxbucket.mutate.values import dtype_of_cast


def sites(seen: SeenGraph) -> Iterator[Site]:
    """Every launch right behind a cast that it alone reads."""
    for launch, sent in plain_launches(seen):
        if dtype_of_cast(sent) is not None and len(sent.users) == 1:
            yield Site(launch.name, "sends what was not cast, which is cast behind its wait", partial(_cast_late, launch.name))


def _cast_late(name: str, broken: BrokenGraph) -> None:
    launch = broken[name]
    cast = launch.all_input_nodes[0]
    dtype = dtype_of_cast(cast)
    sent_otherwise(
        launch,
        cast.all_input_nodes[0],
        lambda wait: broken.behind(wait, torch.ops.aten._to_copy.default, wait, dtype=dtype),
        broken,
    )
