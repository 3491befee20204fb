"""Looks for faults of a pass on a trial: runs it as every rank, looks at the graphs, and runs them on all ranks in lockstep.

A find is an exception, graphs that would hang, other values, a plan that is not kept, or a change when the pass runs again.
"""

from __future__ import annotations

import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from torch import fx

from pytest_fxbucket.checks.promises.automatic import in_flight_problems
from pytest_fxbucket.compat.c10d import twin_name
from pytest_fxbucket.cost.memory import liveness_of
from pytest_fxbucket.errors import FxbucketError, PassError, text_of
from pytest_fxbucket.fuzz import lockstep
from pytest_fxbucket.fuzz.finds import DIFFERS, HANG, KINDS, PLAN, RAISED, TWICE, VALUES, Find, features_of
from pytest_fxbucket.fuzz.our_pass import before_the_pass, run_pass
from pytest_fxbucket.fuzz.program import copied, fake_groups, members_of
from pytest_fxbucket.fuzz.tried_pass import TriedPass, subject_of
from pytest_fxbucket.graph import collectives
from pytest_fxbucket.graph.calls import Call, calls_of, joint_problems
from pytest_fxbucket.graph.reading import read_graph
from pytest_fxbucket.passes.carried import carried
from pytest_fxbucket.passes.keep_order import without_kept_order
from pytest_fxbucket.passes.report import PassReport
from pytest_fxbucket.plan.schema_bucket import Overlap
from pytest_fxbucket.same import two_graphs
from pytest_fxbucket.step.portable import digest, encode

if TYPE_CHECKING:
    from pytest_fxbucket.fuzz.program import Program
    from pytest_fxbucket.fuzz.trial import Trial

_LONGEST_S = 20.0
"""Most that a pass may take for one small program."""
# In sentences of checks/collectives on a result that is read before it has arrived: wrong values, and no hang.
_RACES = ("without waiting", "before its wait")


@dataclass(frozen=True)
class PassOutput:
    """What a pass made of a trial, by rank."""

    trial: Trial
    subject: TriedPass
    after: tuple[fx.GraphModule, ...]

    @property
    def graphs(self) -> list[fx.Graph]:
        """Graphs by rank."""
        return [one.graph for one in self.after]

    @property
    def is_alike(self) -> bool:
        """Whether all ranks launch and wait in one order, so that they can be run in lockstep."""
        return all(lockstep.is_alike(self.graphs[0], other) for other in self.graphs[1:])


def problem(trial: Trial, pass_name: str, kind: str = TWICE) -> str:
    """The first fault of the pass on ``trial``, of ``kind`` or a kind that is looked for before it; empty if there is none."""
    found = judged(trial, subject_of(pass_name), kind)
    return "" if found is None else found.text


def judged(trial: Trial, subject: TriedPass, last: str = TWICE) -> Find | None:
    """The first fault, up to the kind ``last``; None if there is none, or if the pass refused the trial with a sentence."""
    for kind, says, *lines in _findings(trial, subject, set(KINDS[: KINDS.index(last) + 1])):
        # Without features all finds of one sentence are one.
        return Find(kind, says, (*lines,), frozenset() if kind == TWICE else features_of(trial))
    return None


def _findings(trial: Trial, subject: TriedPass, kinds: set[str]) -> Iterator[tuple[str, ...]]:
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
    # In the order of KINDS. The caller takes the first text, so a question is asked only if those before it found nothing.
    for kind, ask in _QUESTIONS:
        if kind in kinds:
            for text in ask(made):
                yield (*text, *_shown(trial.graph_module, made.after[0]))


def made_of(trial: Trial, subject: TriedPass) -> PassOutput:
    """The graphs that the pass makes as each rank; ours runs as the first and the last alone, if these get the same graph.

    Raises what the pass raises, and PassError for a graph that :func:`_run` refuses.
    """
    world = trial.program.world
    if subject.is_ours:
        first, last = (_run(trial, subject, rank) for rank in (0, world - 1))
        if str(first.graph) == str(last.graph):
            return PassOutput(trial, subject, (first,) * world)
    return PassOutput(trial, subject, tuple(_run(trial, subject, rank) for rank in range(world)))


def _run(trial: Trial, subject: TriedPass, rank: int) -> fx.GraphModule:
    """The graph of one rank. Raises what the pass raises, and PassError for a graph of other inputs, or not in order."""
    with fake_groups(trial.program.world, trial.program.groups, rank), _within(_LONGEST_S):
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


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block when it has taken ``seconds``; not in other threads than the first, nor in C."""
    # Python can set signal handlers in the main thread alone, and runs them there between two bytecodes.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"it was not done after {seconds:g} s")

    before, begin = signal.signal(signal.SIGALRM, over), time.monotonic()
    outer, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        # The timer goes first: with the default handler back a late alarm would end the process.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:  # somebody else's limit, such as a test's, goes on; one that is over meanwhile rings at once
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - begin), 1e-6))


def _raised(error: BaseException) -> str:
    if isinstance(error, FxbucketError):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, RecursionError):  # where it was then depends on how deep the caller is
        return "RecursionError: it calls itself without end"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {frames[-1].name}: {text_of(error)[:400]}"


# Would it hang, or read what has not arrived?


def hangs(made: PassOutput) -> Iterator[tuple[str, ...]]:
    """Problems that checks/collectives has with the graphs; none are looked for if it has some with the program already."""
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
        reading = read_graph(plain, *two_graphs.ends(plain))
        calls[rank], own = calls_of(plain, reading, twinned(members_of(program.world, program.groups, rank)))
        found.update(dict.fromkeys(own))
    return [*found, *joint_problems(calls)]


# Other values?


def differs(made: PassOutput) -> Iterator[tuple[str, ...]]:
    """Outputs, and inputs as a run leaves them, that are not bit for bit those of the program.

    For our own pass the graphs are also compared as expressions (:mod:`~pytest_fxbucket.same.two_graphs`), which shows
    differences that the data here does not. Only for a single call: with several, new parameters are what a write left.
    """
    program, before = made.trial.program, made.trial.before
    if not made.is_alike:
        yield VALUES, "ranks launch or wait in another order than the first, so that their values cannot be compared"
    else:
        try:
            texts = lockstep.compare(before, made.after[0], program.world, program.groups, made.graphs)
        except Exception as error:
            yield RAISED, f"what it made raises {_raised(error)}"
            return
        if texts:
            # The first text is the find's sentence. One on values goes first, since the signature of such finds is the kind
            # alone.
            yield VALUES, *sorted(dict.fromkeys(texts), key=lambda text: DIFFERS not in text)
    if made.subject.is_ours and not made.trial.crosses:
        before = before_the_pass(before, made.trial.options.get("transforms", ()))
        for rank in (0, program.world - 1):
            members = twinned(members_of(program.world, program.groups, rank))
            plain = fx.GraphModule(made.after[rank], without_kept_order(made.after[rank].graph))
            for text in two_graphs.problems(before, plain, members):
                yield VALUES, f"rank {rank}: {text}"


# Is the plan kept?


_RULES = {one.name for one in fields(Overlap)}


def broken(made: PassOutput) -> Iterator[tuple[str, ...]]:
    """Launches that the plan merges and the pass left apart, and limits that it does not keep, in the graph of the first rank.

    For a pass that is not ours, our pass says how many launches the plan leaves at least; its values are tested elsewhere.
    """
    trial, subject = made.trial, made.subject
    texts: Iterator[str] = iter(())
    if subject.is_ours:
        texts = _limits(trial, without_kept_order(made.graphs[0]))
    elif subject.takes_plan and trial.plan:
        texts = _launches(trial, made.graphs[0])
    for text in texts:
        yield PLAN, text


def _launches(trial: Trial, graph: fx.Graph) -> Iterator[str]:
    ours = copied(trial.graph_module)
    dtypes = "mixed" if trial.options.get("bucket_mode") == "custom_ops_multidtype" else "separate"
    try:
        with fake_groups(trial.program.world, trial.program.groups):
            # Where launches stand does not change how many there are, so none is prefetched or deferred.
            report = run_pass(ours.graph, trial.plan, dtypes=dtypes, prefetch=0, defer_reduce=False)
    except FxbucketError:  # of what ours refuses nothing is known
        return
    before, after, least = (_by_kind(one) for one in (trial.graph_module.graph, graph, ours.graph))
    for kind in before:
        # More launches than ours: something was not merged. Fewer is a fault only if nothing but their direction kept launches
        # apart in ours: a bucket of forward and backward gathers keeps parameters gathered all the time in between.
        if after[kind] > least[kind]:
            left = "all" if after[kind] >= before[kind] else "some"
            yield f"{left} {kind} launches stay as they were: {after[kind]}, of which the plan makes {least[kind]}"
        elif after[kind] < least[kind] and _parted_by_direction(report, kind):
            yield f"forward and backward share a {kind} launch, which keeps all gathered in between"


def _by_kind(graph: fx.Graph) -> Counter[str]:
    return Counter(kind for node in graph.nodes if (kind := collectives.launch_kind(node)) is not None)


def _parted_by_direction(report: PassReport, kind: str) -> bool:
    """Whether the direction (forward or backward), and nothing else, kept launches of ``kind`` apart."""
    reasons = {split.reason for bucket in report.buckets if bucket.kind == kind for split in bucket.splits}
    return reasons == {"direction"} and all(left.kind != kind for left in report.left_alone)


def _limits(trial: Trial, graph: fx.Graph) -> Iterator[str]:
    rules = Overlap(**{name: value for name, value in trial.options.items() if name in _RULES})
    # Only automatic schedules have limits. They never have symbolic sizes, which counting bytes would specialise.
    if rules.schedule != "auto":
        return
    yield from in_flight_problems(rules, graph)
    share, more = rules.max_memory_increase, rules.max_memory_increase_gb
    if share is None and more is None:
        return
    was, now = (liveness_of(one, *two_graphs.ends(one)).peak for one in (trial.graph_module.graph, graph))
    if share is not None and now > was * (1 + share):
        yield f"{now} bytes live at once, {was} before, and max_memory_increase = {share}"
    if more is not None and now > was + more * (1 << 30):
        yield f"{now} bytes live at once, {was} before, and max_memory_increase_gb = {more}"


# Is a second time nothing?


def again(made: PassOutput) -> Iterator[tuple[str, ...]]:
    """Whether the pass changes its own result when run on it. Not asked of several calls in one graph, which are no step."""
    if made.trial.crosses or _gathers_anew(made.trial.graph_module.graph):
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


def _gathers_anew(graph: fx.Graph) -> bool:
    """Whether a parameter is gathered more than once: a second run counts rounds of merged gathers anew and may go further."""
    counts: Counter[Any] = Counter(
        name for node, one in carried(graph).items() if collectives.is_all_gather(node) for name in one.fqns
    )
    return max(counts.values(), default=0) > 1


def _digest(graph_module: fx.GraphModule, subject: TriedPass) -> str:
    try:
        return digest(encode(graph_module.graph, graph_module, subject.modules))
    except PassError:  # the graph cannot be sent to ranks, and encoding refuses it
        return str(graph_module.graph)


_QUESTIONS: tuple[tuple[str, Callable[[PassOutput], Iterator[tuple[str, ...]]]], ...] = (
    (HANG, hangs),
    (VALUES, differs),
    (PLAN, broken),
    (TWICE, again),
)


def twinned(members: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """``members`` with the twin of each group, of the same ranks."""
    # A pass may launch on twins, which the program does not name.
    return members | {twin_name(name): ranks for name, ranks in members.items()}


def _shown(before: fx.GraphModule, *after: fx.GraphModule) -> list[str]:
    shown = ["before:", *str(before.graph).splitlines()]
    return shown + [line for one in after for line in ("after, on rank 0:", *str(one.graph).splitlines())]
