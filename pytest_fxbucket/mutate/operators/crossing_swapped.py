"""Two values of equal shape that go to another graph, or come from one, change places."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytest_fxbucket.mutate.operator import Seen, Site
from pytest_fxbucket.mutate.values import give, inputs, next_alike, results, trade


def sites(seen: Seen) -> Iterator[Site]:
    """Each output, and each input, that crosses, with the next one like it."""
    place = {one.node: one.place for one in results(seen, "crossing")}
    for first, second in next_alike(seen, place):
        by = {place[first]: second.name, place[second]: first.name}
        yield Site(first.name, f"and {second.name} are returned for each other", partial(give, by))
    for first, second in next_alike(seen, inputs(seen, "crossing").values()):
        readers = tuple(dict.fromkeys(user.name for node in (first, second) for user in node.users))
        if readers:
            yield Site(
                first.name, f"and {second.name} are read for each other", partial(trade, first.name, second.name, readers)
            )
