"""Is a pass well on a trial? It runs as every rank; what it made is looked at, and run on all ranks in lockstep."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import fx

from pytest_fxbucket.compat.c10d import twin_name
from pytest_fxbucket.errors import FxbucketError, PassError, text_of
from pytest_fxbucket.fuzz import kept_promises, lockstep
from pytest_fxbucket.fuzz.features import features_of
from pytest_fxbucket.fuzz.finds import DIFFERS, HANG, PLAN, RAISED, TWICE, VALUES, Find, up_to
from pytest_fxbucket.fuzz.groups import fake_groups, members_of
from pytest_fxbucket.fuzz.program import copied
from pytest_fxbucket.fuzz.time_limit import limited
from pytest_fxbucket.fuzz.transformed import before_the_pass
from pytest_fxbucket.fuzz.tried_pass import Subject, subject_of
from pytest_fxbucket.graph.calls import Call, calls_of, joint_problems
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.passes.keep_order import without_kept_order
from pytest_fxbucket.same.check import ends
from pytest_fxbucket.same.check import problems as other_results
from pytest_fxbucket.step.portable import digest, encode

if TYPE_CHECKING:
    from pytest_fxbucket.fuzz.program import Program
    from pytest_fxbucket.fuzz.trial import Trial

_LONGEST_S = 20.0
"""That a pass may take for one small program."""
_RACES = ("without waiting", "before its wait")


@dataclass(frozen=True)
class Made:
    """What a pass made of a trial, by rank."""

    trial: Trial
    subject: Subject
    after: tuple[fx.GraphModule, ...]

    @property
    def graphs(self) -> list[fx.Graph]:
        """Of each rank."""
        return [one.graph for one in self.after]

    @property
    def is_alike(self) -> bool:
        """Whether all ranks run the same operators in the same order, so that they can be run in lockstep."""
        return all(lockstep.is_alike(self.graphs[0], other) for other in self.graphs[1:])


def problem(trial: Trial, pass_name: str, kind: str = TWICE) -> str:
    """What is not well with the pass on ``trial``, of ``kind`` or of those that are looked for before it; empty: nothing."""
    found = judged(trial, subject_of(pass_name), kind)
    return "" if found is None else found.text


def judged(trial: Trial, subject: Subject, last: str = TWICE) -> Find | None:
    """The first thing that is not well, up to the kind ``last``; None: nothing is, or the pass has refused in words."""
    for kind, says, *lines in _said(trial, subject, set(up_to(last))):
        return Find(kind, says, (*lines,), frozenset() if kind == TWICE else features_of(trial))
    return None


def _said(trial: Trial, subject: Subject, kinds: set[str]) -> Iterator[tuple[str, ...]]:
    try:
        made = made_of(trial, subject)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a pass may end its process, or skip a test
        if not trial.wrong and not subject.may_refuse(trial, error):
            yield RAISED, _raised(error), *_shown(trial.graph_module)
        return
    if trial.wrong:
        if PLAN in kinds:
            yield PLAN, f"{trial.wrong} is taken without a word"
        return
    for kind, ask in _QUESTIONS:
        if kind in kinds:
            for text in ask(made):
                yield (*text, *_shown(trial.graph_module, made.after[0]))


def made_of(trial: Trial, subject: Subject) -> Made:
    """The pass as every rank; ours, if the first and the last get one graph, as these alone.

    Raises what it raises, and PassError for what is no graph as it must be.
    """
    world = trial.program.world
    if subject.is_ours:
        first, last = (_run(trial, subject, rank) for rank in (0, world - 1))
        if str(first.graph) == str(last.graph):
            return Made(trial, subject, (first,) * world)
    return Made(trial, subject, tuple(_run(trial, subject, rank) for rank in range(world)))


def _run(trial: Trial, subject: Subject, rank: int) -> fx.GraphModule:
    """Raises what the pass raises, and PassError for what is no graph of the same inputs, or is not in order."""
    with fake_groups(trial.program.world, trial.program.groups, rank), limited(_LONGEST_S):
        after = subject.run(copied(trial.graph_module), trial)
    if not isinstance(after, fx.GraphModule):
        raise PassError(f"it returned a {type(after).__name__}, expected a GraphModule")
    inputs = [len(one.graph.find_nodes(op="placeholder")) for one in (trial.before, after)]
    if inputs[0] != inputs[1]:
        raise PassError(f"it returned a graph with {inputs[1]} inputs, expected {inputs[0]} as before it")
    try:
        after.graph.lint()
        after.graph.output_node()  # raises if it is not the last node
    except (RuntimeError, AssertionError) as error:
        raise PassError(f"it returned a graph that is not in order: {' '.join(str(error).split())}") from error
    return after


def _raised(error: BaseException) -> str:
    if isinstance(error, FxbucketError):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, RecursionError):  # where it was then depends on how deep the caller is
        return "RecursionError: it calls itself without end"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {frames[-1].name}: {text_of(error)[:400]}"


# Would it hang, or read what has not arrived?


def hangs(made: Made) -> Iterator[tuple[str, ...]]:
    """What checks/collectives says of the graphs, unless it has something to say of the program before the pass."""
    program = made.trial.program
    if problems(program, [made.trial.before.graph] * program.world):
        return
    found = problems(program, made.graphs)
    for text in found:
        yield (VALUES if any(word in text for word in _RACES) else HANG), text, *(one for one in found if one != text)


def problems(program: Program, graphs: list[fx.Graph]) -> list[str]:
    """What checks/collectives says of ``graphs``, one for each rank."""
    calls: dict[int, list[Call]] = {}
    found: dict[str, None] = {}
    for rank, graph in enumerate(graphs):
        plain = without_kept_order(graph)
        reading = read_graph(plain, *ends(plain))
        calls[rank], own = calls_of(plain, reading, twinned(members_of(program.world, program.groups, rank)))
        found.update(dict.fromkeys(own))
    return [*found, *joint_problems(calls)]


# Other values?


def differs(made: Made) -> Iterator[tuple[str, ...]]:
    """Outputs, and inputs as they are left, that are not the same bit for bit; of ours also what no data here shows.

    That is asked of one call alone: in several, new parameters are what a write left.
    """
    program, before = made.trial.program, made.trial.before
    if made.is_alike:
        try:
            texts = lockstep.compare(before, made.after[0], program.world, program.groups, made.graphs)
        except Exception as error:
            yield RAISED, f"what it made raises {_raised(error)}"
            return
        if texts:
            yield VALUES, *sorted(dict.fromkeys(texts), key=lambda text: DIFFERS not in text)
    if made.subject.is_ours and not made.trial.crosses:
        before = before_the_pass(before, made.trial.options.get("transforms", ()))
        for rank in (0, program.world - 1):
            members = twinned(members_of(program.world, program.groups, rank))
            plain = fx.GraphModule(made.after[rank], without_kept_order(made.after[rank].graph))
            for text in other_results(before, plain, members):
                yield VALUES, f"rank {rank}: {text}"


# Is the plan kept?


def broken(made: Made) -> Iterator[tuple[str, ...]]:
    """Launches that the plan merges and the pass left, and limits that it does not keep."""
    for text in kept_promises.broken(made.trial, made.subject, made.graphs):
        yield PLAN, text


# Is a second time nothing?


def again(made: Made) -> Iterator[tuple[str, ...]]:
    """Whether the pass changes what it made; several calls are none that it could be given."""
    if made.trial.crosses or kept_promises.gathers_anew(made.trial.graph_module.graph):
        return
    trial = made.trial.of(made.after[0])
    try:
        second = _run(trial, made.subject, 0)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if not made.subject.may_refuse(trial, error):
            yield TWICE, f"on what it made it raises {_raised(error)}"
        return
    if _digest(second, made.subject) != _digest(made.after[0], made.subject):
        yield TWICE, "it changes what it made", "a second time:", *str(second.graph).splitlines()


def _digest(graph_module: fx.GraphModule, subject: Subject) -> str:
    try:
        return digest(encode(graph_module.graph, graph_module, subject.modules))
    except PassError:  # of what no rank can be sent
        return str(graph_module.graph)


_QUESTIONS: tuple[tuple[str, Callable[[Made], Iterator[tuple[str, ...]]]], ...] = (
    (HANG, hangs),
    (VALUES, differs),
    (PLAN, broken),
    (TWICE, again),
)


def twinned(members: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """``members`` with the twin of each group."""
    return members | {twin_name(name): ranks for name, ranks in members.items()}


def _shown(before: fx.GraphModule, *after: fx.GraphModule) -> list[str]:
    shown = ["before:", *str(before.graph).splitlines()]
    return shown + [line for one in after for line in ("after, on rank 0:", *str(one.graph).splitlines())]
