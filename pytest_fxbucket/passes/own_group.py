"""All-gathers on a process group of their own, so that they do not queue behind the reductions of their group.

The graph names the twin of the group: the same ranks under another name. Ranks make it before they run the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pytest_fxbucket.compat.groups import twin_name
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.ops import overload

if TYPE_CHECKING:
    from torch import fx


def on_own_group(launches: Iterable[fx.Node]) -> None:
    """Let all-gathers among ``launches`` run on the twin of the group that they name, if they do not yet."""
    for launch in launches:
        said = collectives.read_launch(launch)
        if said is not None and said.kind == "all_gather":
            _rename(launch, twin_name(said.group))


def _rename(launch: fx.Node, name: str) -> None:
    operator = overload(launch)
    assert operator is not None
    place = [argument.name for argument in operator._schema.arguments].index("group_name")
    if place < len(launch.args):
        launch.update_arg(place, name)
    else:
        launch.update_kwarg("group_name", name)
