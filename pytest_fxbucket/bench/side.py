"""One side of ``fxbucket compare``, a process in the tree of a commit: ``python -m pytest_fxbucket.bench.side FD PPID``.

It reads requests from stdin and writes answers to the descriptor FD, a line of JSON each: first the plan, answered by what is
to be run; then sets of processes, each answered when its turns are over; the end of stdin ends it. The two sides may be of
different versions: what both must agree on has the number PROTOCOL.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any

from pytest_fxbucket.errors import BenchmarkError, FxbucketError
from pytest_fxbucket.explain.find import find_plan, root_of
from pytest_fxbucket.plan.factories import first_on_path
from pytest_fxbucket.ranks.death import die_with, ignore_interrupts
from pytest_fxbucket.ranks.pools import Pools

if TYPE_CHECKING:
    from pytest_fxbucket.bench.timed_side import TimedSide

PROTOCOL = 1


def main(arguments: list[str]) -> int:
    """Serve until stdin ends; 1 if something went wrong, which was answered, or is the last line of stderr."""
    ignore_interrupts()
    die_with(int(arguments[1]))
    with open(int(arguments[0]), "w", encoding="utf-8") as answers:

        def say(answer: Mapping[str, Any]) -> None:
            print(json.dumps({"protocol": PROTOCOL, **answer}), file=answers, flush=True)

        try:
            for answer in _answers(sys.stdin):
                say(answer)
        except BrokenPipeError:
            return 1
        except FxbucketError as error:
            say({"error": str(error)})
            return 1
        except Exception:
            traceback.print_exc()
            return 1
    return 0


def _answers(requests: IO[str]) -> Iterator[Mapping[str, Any]]:
    first = json.loads(requests.readline() or "{}")
    if first.get("protocol") != PROTOCOL:
        raise BenchmarkError(f"it takes turns by protocol {PROTOCOL}, not {first.get('protocol')}")
    with ExitStack() as stack:
        side = _side(first, stack)
        yield {"facts": side.facts(), "files": _imported()}
        for line in requests:
            yield side.take_turns(json.loads(line))


def _side(asked: Mapping[str, Any], stack: ExitStack) -> TimedSide:
    """The plan in its world, its folders on the path, its ranks being started meanwhile; until ``stack`` is unwound."""
    plan, _ = find_plan(asked["plan"])
    folders = [plan.path.resolve().parent, root_of(plan.path)]
    pools = Pools(("pytest_fxbucket.bench.turn_job",))
    stack.callback(pools.close)
    pools.start()
    stack.enter_context(first_on_path(folders))
    from pytest_fxbucket.bench.timed_side import TimedSide
    from pytest_fxbucket.capture.mesh import mesh_of
    from pytest_fxbucket.world import World

    world = World(plan, mesh_of(plan, run=True), asked["pass"], lambda _: None)
    return TimedSide(world, asked["variant"], asked["backend"], pools, folders)


def _imported() -> list[str]:
    """Files of all modules of this process."""
    found = [vars(module).get("__file__") for module in list(sys.modules.values()) if type(module) is type(sys)]
    return [path for path in found if isinstance(path, str)]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
