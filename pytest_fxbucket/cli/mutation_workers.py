"""Mutants judged by one process or several, each with the plan captured and ranks of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from queue import Empty
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.mutate.score import MutationScore
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

    from pytest_fxbucket.mutate.judge import MutantSelection
    from pytest_fxbucket.plan.schema import Plan
    from pytest_fxbucket.settings import RunSettings

_LOOK_S = 0.5
"""How often it is seen whether a worker still lives."""


def scored_by_workers(
    plan: Plan, settings: RunSettings, asked: MutantSelection, workers: int, say: Callable[[str], None]
) -> Iterator[MutationScore]:
    """The score so far, after each mutant that a worker has judged; one worker is this process itself.

    Raises what :meth:`PlanRun.mutated` does, and FxbucketError for a worker that ends before its work is done.
    """
    if workers == 1:
        yield from _scored(plan, settings, asked, say)
        return
    # Not fork, which copies no threads: one that shows progress runs here, and torch has some of its own.
    context = multiprocessing.get_context("spawn")
    news: Queue[Any] = context.Queue()
    parts = [replace(asked, worker=number, workers=workers) for number in range(workers)]
    processes = [context.Process(target=_work, args=(plan, settings, part, news)) for part in parts]
    for process in processes:
        process.start()
    scores = [MutationScore((), 0)] * workers
    try:
        for number, told in _news(processes, news):
            if isinstance(told, FxbucketError):
                raise told
            if isinstance(told, str):
                say(told)
            else:
                scores[number] = told
                yield _together(scores)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _news(processes: list[Any], news: Queue[Any]) -> Iterator[tuple[int, Any]]:
    """(number of the worker, what it tells), until each has told None: it is done."""
    working = set(range(len(processes)))
    while working:
        try:
            number, told = news.get(timeout=_LOOK_S)
        except Empty:
            # A worker may have told its last news and ended since the queue was looked at: these are read first.
            if any(not processes[number].is_alive() for number in working) and news.empty():
                raise FxbucketError("a worker ended before its mutants were judged") from None
            continue
        if told is None:
            working.discard(number)
        else:
            yield number, told


def _scored(plan: Plan, settings: RunSettings, asked: MutantSelection, say: Callable[[str], None]) -> Iterator[MutationScore]:
    pools = Pools()
    try:
        yield from PlanRun(plan, settings, pools, say).mutated(asked)
    finally:
        pools.close()


def _work(plan: Plan, settings: RunSettings, asked: MutantSelection, news: Queue[Any]) -> None:
    try:
        for score in _scored(plan, settings, asked, lambda line: news.put((asked.worker, line))):
            news.put((asked.worker, score))
        news.put((asked.worker, None))
    except FxbucketError as error:
        news.put((asked.worker, error))
    except KeyboardInterrupt:
        pass  # whoever started it says so


def _together(scores: list[MutationScore]) -> MutationScore:
    """One score of all workers, with the mutants in the order in which a single process would have judged them."""
    # Each worker knows how many mutants the plan has in all; 0 is of one that has told nothing yet.
    turns = zip_longest(*(score.judged for score in scores))
    return MutationScore([one for turn in turns for one in turn if one is not None], max(score.possible for score in scores))
