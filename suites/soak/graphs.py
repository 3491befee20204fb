"""The part of the soak that looks at our pass: random graphs and plans on real ranks, before and after it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator

from pytest_fxbucket.ranks.pools import Pools
from suites.fuzz.hunt import hunt


def graphs(count: int, seed: int, say: Callable[[str], None]) -> Iterator[str]:
    """`count` graphs at 3 ranks, a tenth as many at 4 with groups within the world; the first that is not equal, cut short."""
    pools = Pools(warm=("suites.passes.rank_jobs_of_passes",))
    try:
        for world, part in ((3, count), (4, count // 10)):
            found = hunt(pools, world, part, seed)
            say(f"graphs: {found.equal} of {part} equal at {world} ranks, {found.merged} of them merged; seed {seed}")
            if found.trouble is not None:
                text = "".join(traceback.format_exception(found.trouble))
                yield f"graph {found.equal + 1} of {part} at {world} ranks, seed {seed}:\n{text}"
    finally:
        pools.close()
