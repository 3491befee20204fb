"""The check ``eager`` of one plan: it gives ranks their tasks, and judges what they bring back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from pytest_fxbucket.backends import BACKENDS
from pytest_fxbucket.checks.bitwise import judge
from pytest_fxbucket.checks.bitwise.check import steps_of, task_of
from pytest_fxbucket.checks.bitwise.crossing import run_digests
from pytest_fxbucket.checks.devices import attends_otherwise
from pytest_fxbucket.checks.on_ranks import OnRanks, refuse_too_large, removed_state
from pytest_fxbucket.checks.verdict import Verdict, failed, failed_on_ranks, passed, skipped
from pytest_fxbucket.eager.divergence import moved
from pytest_fxbucket.eager.job import EagerOutcome, EagerTask
from pytest_fxbucket.eager.reasons import TRIED_OUT, WORDS, gradients_alone, lacking, made_equal
from pytest_fxbucket.ranks.failure import RankFailure

if TYPE_CHECKING:
    from pytest_fxbucket.checks.context import Context
    from pytest_fxbucket.step.roles import StepGraph


_OF_MODE = {"fully_shard": "FSDP2", "hybrid_shard": "FSDP2", "replicate": "DistributedDataParallel"}
_SHOWN = 8


@dataclass(frozen=True)
class Eager(OnRanks):
    """torch's own step of a plan's model beside the final step of the plan, on ranks."""

    pipe: str = ""
    """Named pipe through which ranks report each step (:mod:`pytest_fxbucket.eager.step_reports`)."""
    steady: bool = False
    """Whether learning rates stay as they are. Else they change from step to step, so that one of a wrong step shows."""

    def verdict(self) -> Verdict:
        """Run both. Raises what capture and passes raise, and RankError for ranks that cannot be had."""
        plan, world = self.world.plan, self.world
        if missing := lacking(plan, world.step(0), world.resolution, world.captured.rounding):
            return skipped("eager", missing)
        if (how := world.final_step(0).pipelined) and how.ties and not plan.eager.factory:
            (fqn, stages), *_ = how.ties
            return skipped(
                "eager",
                f"stages {stages[0]} and {stages[1]} each reduce their gradient of {fqn}, which {self._torchs} adds first; "
                "an [eager] factory of yours may do as they do",
            )
        if plan.run.reduce == "ring" and BACKENDS[self.backend].has_own_sums:
            return skipped("eager", 'NCCL adds in an order of its own; [run] reduce = "ring" is for gloo and local')
        if BACKENDS[self.backend].gpus and any(map(attends_otherwise, world.step(0).graphs.values())):
            return skipped(
                "eager",
                "on a GPU the model's attention is another kernel than in the graph, which is traced on the CPU; write "
                'attention out, or use run.backend = "gloo"',
            )
        # Each rank has the model twice: the graph's, and that of torch's own step.
        refuse_too_large(world.step(0).parameters, 2 * world.size, self.context.name, "eager")
        try:
            seen = self._run_ranks()
            lines = list(self._problems(seen))
            step, by_design = judge.first_step(seen), tuple[str, ...]()
            if step is not None:
                lines += judge.difference_lines(seen, world.entry_of)
                # Ranks run once more: only where a step differs are its bits followed, and does a reason need to be found.
                followed = self._run_ranks(step)
                by_design = tuple(self._by_design(seen, followed))
                lines += [*self._moved(seen), *self._divergence(followed), *map(_said_of_design, by_design)]
        except RankFailure as failure:
            return failed_on_ranks("eager", failure)
        if lines:
            found = failed("eager", f"the bucketed step is not shown to be that of {self._torchs}", lines)
            return replace(found, by_design=by_design)
        if cannot := next((one.cannot for one in seen if one.cannot), ""):
            return skipped("eager", f"{self._torchs} cannot step this model: {cannot}")
        return passed("eager", self._equal(seen))

    @property
    def _torchs(self) -> str:
        if self.world.plan.eager.factory:
            return f"the trainer {self.world.plan.eager.factory}"
        parallel = self.world.plan.parallel
        tp = " over parallelize_module" if parallel.tp > 1 else ""
        ep = " with tokens sent by all_to_all_single" if parallel.ep > 1 else ""
        return f"torch's {_OF_MODE[parallel.mode]}{tp}{ep}"

    def _run_ranks(self, localise: int | None = None, stated: tuple[str, ...] = ()) -> list[EagerOutcome]:
        """Have ranks run. ``localise`` is a step to follow module by module; ``stated`` are reasons to add to the plan's."""
        world = self.world
        own = world.plan.eager
        plan = replace(world.plan, eager=replace(own, rounds_otherwise=(*own.rounds_otherwise, *stated)))
        graphs = [replace(task_of(world, "joint", rank, self.backend), compiler="none") for rank in range(world.size)]
        # A run that follows a step, or tries a reason out, takes steps again that were reported already.
        pipe, removed = self.pipe if localise is None and not stated else "", tuple(removed_state(world))
        unread = _unread(world.step(0)) if world.plan.pipeline is not None else ()
        idle = frozenset(self.may_be_idle())
        tasks = [EagerTask(plan, graph, localise, removed, idle, unread, pipe, self.steady) for graph in graphs]
        self.context.say(f"waiting for {world.size} ranks to run {steps_of(world)} steps, and as many of {self._torchs}")
        return cast("list[EagerOutcome]", self.ask("pytest_fxbucket.eager.job:run", tasks, "eager"))

    def _problems(self, seen: Sequence[EagerOutcome]) -> Iterator[str]:
        world = self.world
        yield from judge.wrong_graphs(seen, [tuple(run_digests(world, "joint", rank)) for rank in range(world.size)])
        yield from dict.fromkeys(f"{self._torchs}: {one.wrong}" for one in seen if one.wrong)
        yield from dict.fromkeys(f"{self._torchs} stepped, and then raised {one.cannot}" for one in seen if _stopped(one))
        sided = dict.fromkeys(clause for one in seen for clause in one.one_sided)
        # A rank of a pipeline has the graphs of its stages alone: what it lacks counts if all other ranks lack it, too.
        in_stages = world.plan.pipeline is not None
        sided |= {
            clause: None
            for one in seen
            for clause in one.lacking
            if not in_stages or all(clause in other.lacking for other in seen)
        }
        yield from list(sided)[:_SHOWN]
        if not any(one.compared or one.cannot or one.wrong for one in seen):
            yield "nothing was compared"
        stated = self.world.plan.eager.rounds_otherwise
        if not any(one.cannot for one in seen):
            for reason in stated:
                if not any(reason in one.reasons for one in seen):
                    yield f'[eager] rounds_otherwise states "{reason}", but the model has no such thing; take it out'

    def _divergence(self, seen: Sequence[EagerOutcome]) -> Iterator[str]:
        if stopped := next((one.cannot or one.wrong for one in seen if one.cannot or one.wrong), ""):
            yield f"the step could not be followed to its place: {stopped}"
            return
        divergences = {
            rank: one.divergence for rank, one in enumerate(seen) if one.divergence is not None and one.divergence.operator
        }
        if divergences:
            rank, first = next(iter(divergences.items()))
            what = "output" if first.direction == "forward" else "gradient"
            yield f"first module whose {what} differs: {first.module or 'the model'} ({first.operator}), on rank {rank}"
        else:
            yield (
                "each module computes the same bits in both directions: they part outside of modules, in a sum over "
                "microbatches, a reduction, clipping, an update or a write"
            )
            if hooked := seen[0].hooked:
                yield (
                    f"parameter {hooked} has a hook of register_hook, which runs on its gradient here, as under DDP, and which "
                    "FSDP2 drops; an [eager] factory of yours may do what it does"
                )
            parallel = self.world.plan.parallel
            if parallel.param_dtype and not parallel.reduce_dtype:
                yield (
                    "reduce_dtype is left out: a plan reduces in the gradient's dtype then, FSDP2 from torch 2.15 on in the "
                    "parameter's own; write the one that you mean"
                )

    def _by_design(self, seen: Sequence[EagerOutcome], followed: Sequence[EagerOutcome]) -> Iterator[str]:
        for reason in dict.fromkeys(reason for one in followed for reason in one.reasons):
            is_known = reason in self.world.plan.eager.rounds_otherwise
            if not is_known and (reason not in TRIED_OUT or self._goes_with(reason, seen)):
                yield reason

    def _goes_with(self, reason: str, seen: Sequence[EagerOutcome]) -> bool:
        """Whether gradients become equal in a run that has ``reason`` stated. It is run only where gradients alone differ."""
        if not gradients_alone(seen):
            return False
        stated = self._run_ranks(stated=(reason,))
        return not any(one.cannot or one.wrong for one in stated) and made_equal(seen, stated)

    def _moved(self, seen: Sequence[EagerOutcome]) -> Iterator[str]:
        world, plan = self.world, self.world.plan
        is_ddp = plan.parallel.mode == "replicate"
        # Where bytes lie in buckets of a user's trainer, or of DistributedDataParallel, is not known here.
        unknown = plan.eager.factory or (is_ddp and "ddp_buckets" not in plan.eager.rounds_otherwise)
        if plan.run.reduce != "ring" or unknown or plan.pipeline is not None:
            return
        differing = {one.fqn for each in seen for one in each.differences if one.what == "gradient"}
        if line := moved(world.final(0)["joint"].reading, seen[0].units, differing, self._torchs):
            yield line

    def _equal(self, seen: Sequence[EagerOutcome]) -> str:
        world, plan = self.world, self.world.plan
        tensors = min(one.compared for one in seen) // steps_of(world)
        notes = "".join(f"; {WORDS[reason]}" for reason in plan.eager.rounds_otherwise)
        ring = "; sums round a ring" if plan.run.reduce == "ring" else ""
        parts = "parts of sequences give what wholes do" if plan.parallel.cp > 1 else "some experts give what they do among all"
        unasked = next((f"; not asked whether {parts}: {one.unasked}" for one in seen if one.unasked), "")
        what = f"{tensors} tensors a step (loss, gradients, parameters, buffers, state) are those of {self._torchs} bit for bit"
        return f"{what} on {world.size} ranks in {steps_of(world)} steps over {self.over}{ring}{notes}{unasked}"


def _unread(whole: StepGraph) -> tuple[tuple[str, str], ...]:
    """Role and name of the parameters and buffers that the whole step, not cut into stages, does not read.

    So a value that a stage should read, but its graph does not, is not among them.
    """
    places = zip(whole.inputs["joint"], whole.graphs["joint"].graph.find_nodes(op="placeholder"), strict=True)
    return tuple(value.key for value, node in places if value.role in ("param", "buffer") and not node.users)


def _said_of_design(reason: str) -> str:
    return f'by design: {WORDS[reason]}; [eager] rounds_otherwise = ["{reason}"] holds everything else'


def _stopped(one: EagerOutcome) -> bool:
    """Whether torch's own step raised after a step that worked: then it is no model that torch cannot step."""
    return bool(one.cannot and one.compared)


def run(context: Context, pipe: str = "", steady: bool = False) -> Verdict:
    """The check ``eager``. Raises what capture and passes raise, and RankError for ranks that cannot be had."""
    choice = context.choice("eager")
    return choice if isinstance(choice, Verdict) else Eager(context, choice, pipe, steady).verdict()
