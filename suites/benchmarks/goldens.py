"""Prints what goldens cost: the text of a graph of 30,000 nodes, its listing, two kinds of diff, and 200 goldens compared.

A joint graph of a decoder with nine parameters a layer, really traced and passed. Seconds of this process on a core, best of
several, as in ``passes.py``. What the graph costs itself, tracing, passing and reading it, is in the row alone that says so.
``make bench``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from pytest_fxbucket.cli.show import full_text
from pytest_fxbucket.golden import text as schedule_text
from pytest_fxbucket.golden.mismatch import change_lines
from pytest_fxbucket.golden.store import GoldenStore, render
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.plan_on_mesh import text_of
from pytest_fxbucket.process import collector
from suites.benchmarks.passes import Graphs, clock

LAYERS = 108
GOLDENS = 200
TURNS = 5
NAME = "decoder.toml"


def main() -> None:
    """Print one row a figure."""
    graphs = Graphs(LAYERS)
    graphs.passed  # noqa: B018 - traced and passed once, before anything is timed
    nodes = len(graphs.passed.bucketed.graph.nodes)
    found = text_of(graphs.world, 0, NAME)
    written = unfolded(graphs)
    rows: dict[str, tuple[float | None, Callable[[], object]]] = {
        "text": (1, lambda: text_of(graphs.world, 0, NAME)),
        "text, with reading the graph": (None, lambda: (read(graphs), text_of(graphs.world, 0, NAME))),
        "listing of every node": (1, lambda: full_text(graphs.world, 0, NAME)),
        "diff, several changes": (1, lambda: change_lines(found, several(found))),
        "diff, every layer differs": (1, lambda: change_lines(found, every_layer(found))),
        "diff, every layer, nothing folds": (1, lambda: change_lines(written, every_other(written))),
    }
    print(f"{nodes:,} nodes, {len(found.splitlines())} lines of text, {len(written.splitlines()):,} with nothing folded")
    for name, (aim, work) in rows.items():
        say(name, best(work), aim)
    say(f"{GOLDENS} goldens compared", compared(written), 2)


def say(name: str, seconds: float, aim: float | None) -> None:
    """One row."""
    print(f"{name:34} {seconds:7.3f} s{f', to stay under {aim:g}' if aim else ''}", flush=True)


def best(work: Callable[[], object]) -> float:
    """Fewest seconds of several runs."""
    with collector.paused():
        return min(clock(work) for _ in range(TURNS))


def read(graphs: Graphs) -> object:
    """Follow every byte through the graph that came out."""
    step = graphs.step
    return read_graph(graphs.passed.bucketed.graph, step.inputs["joint"], step.outputs["joint"])


def unfolded(graphs: Graphs) -> str:
    """The text where no layer is like another: as many lines as a graph of this size can have."""
    with nothing_folds():
        return text_of(graphs.world, 0, NAME)


@contextmanager
def nothing_folds() -> Iterator[None]:
    """Write every layer out."""
    lines = schedule_text.schedule_lines
    with mock.patch("pytest_fxbucket.golden.text.schedule_lines", lambda schedule: lines(schedule, folded=False)):
        yield


def several(text: str) -> str:
    """A bucket that lost a member, another group, and launches and waits elsewhere, in single layers."""
    lines = text.replace("bytes, dp_shard", "bytes, tp", 1).splitlines()
    events = [i for i, line in enumerate(lines) if line.lstrip().startswith(("launch", "wait"))]
    for i in events[1 : len(events) - 1 : max(1, len(events) // 5)]:
        lines[i], lines[i + 1] = lines[i + 1], lines[i]
    member = next(i for i, line in enumerate(lines) if ".weight " in line)
    del lines[member]
    return "\n".join(lines) + "\n"


def every_layer(text: str) -> str:
    """Other bytes in all buckets, and each wait before the compute that it stood behind."""
    return text.replace(" bytes, ", "0 bytes, ").replace("  wait    all_gather", "  wait    broadcast")


def every_other(text: str) -> str:
    """Every second event of a layer swapped with the next, and other bytes in every bucket."""
    lines = every_layer(text).splitlines()
    for i in range(4, len(lines) - 1, 4):
        if lines[i].startswith("  ") and lines[i + 1].startswith("  "):
            lines[i], lines[i + 1] = lines[i + 1], lines[i]
    return "\n".join(lines) + "\n"


def compared(text: str) -> float:
    """What is there beside the graphs' own cost: find each golden's file, read it, compare it."""
    with tempfile.TemporaryDirectory() as folder:
        store = GoldenStore(Path(folder) / "golden", Path(folder))
        plans = [Path(folder) / f"plan{i}.toml" for i in range(GOLDENS)]
        for plan in plans:
            plan.write_text('[model]\nfactory = "m:f"\n[[matrix]]\nid = "row"\n', encoding="utf-8")
            golden = store.path_for(plan, None)
            golden.parent.mkdir(exist_ok=True)
            golden.write_text(render(text), encoding="utf-8")

        def work() -> None:
            assert all(store.read(store.path_for(plan, None)) == text for plan in plans)

        return best(work)


if __name__ == "__main__":
    main()
