"""Traces forward, loss and backward of a parted model into one joint graph; no GPU, no processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

import torch
from torch import fx, nn

from pytest_fxbucket.capture.backward import (
    DenseGradients,
    StageRead,
    backward_in_forward,
    checkpoints_traced,
    notes_of,
    reached,
)
from pytest_fxbucket.capture.batch import microbatches, refuse_other_loss, refuse_unread, split_of
from pytest_fxbucket.capture.caches import without_fake_caches
from pytest_fxbucket.capture.draws import draws_on_tape
from pytest_fxbucket.capture.names import NodeNamer, StageMarks, first_names, inputs_cast
from pytest_fxbucket.capture.override.anchors import Anchors
from pytest_fxbucket.capture.override.expand import expand
from pytest_fxbucket.capture.override.overrides import NONE, Overrides
from pytest_fxbucket.capture.parallel.context_parallel import AttentionToAll
from pytest_fxbucket.capture.parallel.experts import ExpertReads
from pytest_fxbucket.capture.parallel.forwards import Forwards, other_forwards
from pytest_fxbucket.capture.parallel.parts import ParameterShards, describe_parameters
from pytest_fxbucket.capture.parallel.sequence_parallel import place_name
from pytest_fxbucket.capture.parallel.tensor_parallel import Shapes, refuse_parts, shapes_of, tp_hint
from pytest_fxbucket.capture.parallel.unshard import ParameterTravel, Reader, hooks_of, own_parameters, read_by
from pytest_fxbucket.capture.python_state import trace_settled
from pytest_fxbucket.capture.refusals import (
    refuse_constants,
    refuse_drawing_again,
    refuse_lost,
    refuse_mixed_dtypes,
    refuse_unwritable,
    refuse_written_parameters,
)
from pytest_fxbucket.capture.reshard import gather_again_in_backward
from pytest_fxbucket.capture.unregistered import keep_buffers, refuse_other_buffers, take_as_inputs
from pytest_fxbucket.compat import pytree, tracing
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.compat.modules import on_in_backward, uncompiled
from pytest_fxbucket.graph.collectives import is_all_gather, is_wait, sent_by
from pytest_fxbucket.plan.factories import dtype_named
from pytest_fxbucket.plan.table_rules import Path
from pytest_fxbucket.step.roles import Parameter, Value
from pytest_fxbucket.user_frame import naming_user_frame

LossFn = Callable[[Any, Any], Any]
S = TypeVar("S", bound="JointStep")


@dataclass(frozen=True)
class Joint:
    """Forward and backward of one step."""

    graph: fx.GraphModule
    """Inputs: parts of the parameters, buffers, state of overridden modules, tensors of the batch. Outputs: the loss, the
    reduced gradients, new state."""
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    """In registration order."""
    notes: tuple[str, ...] = ()
    """What was traced otherwise than the model has it, one clause each."""


def trace_joint(model: nn.Module, make: Callable[[], JointStep]) -> Joint:
    """Trace the loss of the step that ``make`` gives for ``model``, and the gradient of every trainable parameter, into one
    joint graph.

    Raises :class:`CaptureError` for what cannot be traced.
    """
    step, graph_module = traced_joint(model, make)
    values = step.input_values
    placed = dict(zip(graph_module.graph.find_nodes(op="placeholder"), values, strict=True))
    parameters = {node: value.fqn for node, value in placed.items() if value.role == "param"}
    refuse_mixed_dtypes(graph_module.graph, parameters, step.parts.parallel.param_dtype)
    refuse_lost(step.lost_gradients())
    outputs = (Value("loss", "", (), None), *step.grad_values, *(v for v in values if v.role == "state"))
    kept = step.forwards.resharding.kept_gathered(graph_module.graph, values, outputs)
    # What is gathered of the batch is an activation, and a kept parameter stays gathered: backward reads forward's result of
    # both.
    stay = [node for node, value in placed.items() if value.role == "batch" or (value.role == "param" and value.fqn in kept)]
    gather_again_in_backward(graph_module.graph, stay)
    graph_module.graph.eliminate_dead_code(_has_effect)
    graph_module.recompile()
    return Joint(
        graph_module,
        tuple(values),
        outputs,
        tuple(step.parameters),
        notes=tuple(notes_of(model, step.parameters, step.dense, [v.fqn for v in values if v.role == "held"])),
    )


def traced_joint(model: nn.Module, make: Callable[[], S]) -> tuple[S, fx.GraphModule]:
    """Trace the step that ``make`` gives for ``model``. Tensors that the model only holds become inputs, before the batch."""

    def traced() -> tuple[S, fx.GraphModule]:
        step = make()
        with step.fake_mode, naming_user_frame(lambda: f"tracing {step.namer.where}", step.hint):
            graph_module = tracing.trace(step, step.inputs)
        refuse_constants(graph_module, model)
        for node in graph_module.graph.nodes:
            refuse_unwritable(node.target)
        return step, graph_module

    step, graph_module = trace_settled(model, traced, lambda step: step.run_alone())
    # Sub-graphs are put in behind the trace, where the tape of draws has ended, so what they put in must not draw again in
    # backward.
    traced_nodes = set(graph_module.graph.nodes)
    expand(graph_module.graph, step.anchors, partial(_hold, graph_module))
    refuse_drawing_again(node for node in graph_module.graph.nodes if node not in traced_nodes)
    refuse_written_parameters(graph_module)
    values = step.input_values
    before_batch = len(values) - len(step.tensors)
    values[before_batch:before_batch] = take_as_inputs(graph_module, model, step.fake_mode, before_batch)
    return step, graph_module


def _has_effect(node: fx.Node) -> bool:
    """Whether ``node`` must stay though nobody reads it. Gathers need not, as of a pooler whose output no loss reads."""
    # To torch.fx a wait has a side effect, so plain elimination of dead code would keep it and the gather that it waits for.
    gather = sent_by(node) if is_wait(node) else node
    return node.is_impure() and not (isinstance(gather, torch.fx.Node) and is_all_gather(gather))


def _hold(graph_module: fx.GraphModule, constant: torch.Tensor) -> str:
    name = next(name for number in count() if not hasattr(graph_module, name := f"_override_constant_{number}"))
    setattr(graph_module, name, constant)
    return name


class JointStep:
    """Forward, loss and backward as one function of flat tensors: parts of parameters, buffers, state, then the batch."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: LossFn,
        parts: ParameterShards,
        forwards: Forwards,
        fake_mode: FakeTensorMode,
        count: int = 1,
        overrides: Overrides = NONE,
        inputs: Sequence[Path] = (),
        cuts: Sequence[str] = (),
    ) -> None:
        """``model`` was built under ``fake_mode``; the loss is ``loss(model(inputs), targets)``.

        ``batch`` is a tuple, list or dict of real tensors, which are cut into ``count`` microbatches on dimension 0; the loss
        is the mean of theirs. ``inputs`` are those that the model gets, as in ``[model]``. ``overrides`` are modules that are
        not traced, ``cuts`` those behind which pipeline stages end: each stage gathers the parameters that it reads.
        """
        self.model, self.loss, self.parts, self.forwards, self.count = model, loss, parts, forwards, count
        self.split = split_of(model, batch, inputs)
        refuse_unread(loss, self.split, batch)
        names = first_names(model)
        self.marks = StageMarks(names.get(cut, cut) for cut in cuts)
        self.namer, self.fake_mode, self.own = NodeNamer(model, marks=self.marks), fake_mode, own_parameters(model)
        self.dense = DenseGradients(lambda: self.namer.running)
        self.param_dtype = dtype_named(parts.parallel.param_dtype)
        self.anchors = Anchors(overrides, fake_mode, self.param_dtype)
        states = {fqn: fake_mode.from_tensor(tensor) for fqn, tensor in overrides.first_state.items()}
        self.anchors.states = states
        experts = forwards.expert_parameters(model)
        self.expert_reads = ExpertReads(experts)
        with fake_mode:
            self.parameters = describe_parameters(model, parts, forwards.parted, experts)
        reduce_dtype, mode = dtype_named(parts.parallel.reduce_dtype), parts.parallel.mode
        summed, tp = forwards.sequences.summed(model), parts.mesh.group("tp")
        self.travels = {
            p.fqn: ParameterTravel(
                *(parts.mode(p.is_expert), torch.Size(p.local_shape), self.param_dtype, reduce_dtype, p.fqn, mode),
                summed_over=tp if p.fqn in summed else None,
            )
            for p in self.parameters
        }
        self.trainable = [p.fqn for p in self.parameters if p.trainable]
        self.hooks = hooks_of(model)
        self.used: list[str] = []
        paths, self.spec = pytree.tree_flatten_with_path(batch)
        self.leaves = [leaf for _, leaf in paths]
        self.tensors = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        with fake_mode:
            # A rank's index is an input like a buffer, so that one graph serves all ranks.
            self.places = {dim: torch.zeros((), dtype=torch.int64) for dim in forwards.index_dimensions}
        self.buffers = dict(model.named_buffers()) | {place_name(dim): place for dim, place in self.places.items()}
        with fake_mode:
            shards = [torch.empty(p.shard_shape, dtype=p.dtype, requires_grad=p.trainable) for p in self.parameters]
        fakes = [fake_mode.from_tensor(self.leaves[i]) for i in self.tensors]
        self.inputs = [*shards, *self.buffers.values(), *states.values(), *fakes]
        # Taken while no forward is parted: a later output of another shape is a rank's part that nobody joined.
        self.whole = self._whole_shapes(fakes) if forwards.parted else None
        keys = [("param", p.fqn) for p in self.parameters] + [("buffer", fqn) for fqn in self.buffers]
        keys += [("state", fqn) for fqn in states]
        keys += [("batch", pytree.keystr(paths[i][0])) for i in self.tensors]
        self.input_values = [
            Value(role, fqn, tuple(tensor.shape), tensor.dtype)  # type: ignore[arg-type]  # one of the roles
            for (role, fqn), tensor in zip(keys, self.inputs, strict=True)
        ]

    def hint(self, error: Exception) -> str:
        """What the user may have meant, or can do, where ``error`` was raised; empty if nothing is known."""
        if tracing.looks_at_values(error):
            failed = self.namer.failed
            return f'[[override]] module = ["{failed}"] calls it as it is when the step runs' if failed else ""
        of_batch = self.split.hint if isinstance(error, (TypeError, AttributeError)) else ""
        return of_batch or tp_hint(self.forwards.parted, self.parts.mesh.degree("tp"), error)

    @property
    def grad_values(self) -> list[Value]:
        """The gradients among the outputs, in their order."""
        by_fqn = {p.fqn: p for p in self.parameters}
        return [Value("grad", fqn, by_fqn[fqn].shard_shape, by_fqn[fqn].dtype) for fqn in self.used]

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The loss, the reduced gradients of :attr:`used`, new state, from tensors like :attr:`inputs`."""
        shards = dict(zip((p.fqn for p in self.parameters), inputs, strict=False))
        # The order of ``inputs``: shards, buffers with the rank's indices, state, batch.
        before_states = len(shards) + len(self.buffers)
        states = dict(zip(self.anchors.states, inputs[before_states:], strict=False))
        self.anchors.states = states
        with draws_on_tape():
            losses, grads = self._microbatches(self.leaves_with(inputs[before_states + len(states) :]), shards)
        self.used = [fqn for fqn in self.trainable if fqn in grads]
        return [sum(losses[1:], losses[0]), *(grads[fqn] for fqn in self.used), *states.values()]

    def leaves_with(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Leaves of the batch, with ``tensors`` in the places of its own."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.tensors, tensors, strict=True):
            leaves[i] = tensor
        return leaves

    @contextmanager
    def running(self, reader: Reader) -> Iterator[None]:
        """While inside, the model runs as it is traced, on what ``reader`` gives."""
        with ExitStack() as inside:
            inside.enter_context(without_fake_caches(self.model))
            inside.enter_context(checkpoints_traced(reader.summed_separately))
            inside.enter_context(read_by(self.model, self.own, partial(self._read, reader)))
            inside.enter_context(self.dense)
            inside.enter_context(uncompiled())
            inside.enter_context(self.anchors.in_place())
            given = self.model, self.forwards, self.parts.mesh, self.namer, self.places, self.expert_reads
            inside.enter_context(other_forwards(*given))
            inside.enter_context(inputs_cast(self.model, self.forwards.units, self.param_dtype, self.namer))
            inside.enter_context(self.namer.watching(self.model))
            form = self.forwards.cp_form
            attention = AttentionToAll(self.parts.mesh.group("cp"), self.places["cp"], form) if form else None
            if attention is not None:
                inside.enter_context(on_in_backward(attention))
            yield
            if attention is not None:
                attention.refuse_unused()

    def _read(self, reader: Reader, fqn: str) -> torch.Tensor:
        self.expert_reads.refuse(fqn)
        return reader.read(fqn)

    def _microbatches(
        self, leaves: Sequence[Any], shards: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """The loss of each microbatch, and the reduced gradients of all together, by FQN."""
        # Each microbatch has a reader of its own, so it gathers parameters anew. In all microbatches but the last, gradients
        # are asked for the gathered parameters and added up in ``before``, not reduced. In the last they are asked for the
        # shards: the backward of the gather adds what ``before`` has and reduces once.
        losses: list[torch.Tensor] = []
        grads: dict[StageRead, torch.Tensor] = {}
        before: dict[StageRead, torch.Tensor] = {}
        for number, part in enumerate(microbatches(leaves, self.count)):
            last = number == self.count - 1
            reader = Reader(shards, self.travels, self.namer, before, last, self.hooks, bool(self.marks.cuts))
            with self.running(reader):
                with backward_in_forward(reader.whole, partial(self._add, before)):
                    loss = self.forward(part)
                self.namer.start_backward(loss)
                if last:
                    grads = self._reduced_before(before, reader.whole, shards, loss)
                    read = {read: part for read, part in reader.parts.items() if part.requires_grad}
                    late = torch.autograd.grad(loss, list(read.values()), allow_unused=True)
                    grads = {one: grad for one, grad in zip(read, late, strict=True) if grad is not None} | grads
                else:  # added up, not reduced
                    read = {read: tensor for read, tensor in reader.whole.items() if tensor.requires_grad}
                    found = torch.autograd.grad(loss, list(read.values()), allow_unused=True)
                    for one, grad in zip(read, found, strict=True):
                        if grad is not None:
                            self._add(before, one, grad)
                summed = self._summed(grads)
                self.namer.end_backward()
                keep_buffers(self.model, self.buffers, self.namer)
            losses.append(loss)
        return losses, summed

    def _add(self, before: dict[StageRead, torch.Tensor], read: StageRead, gradient: torch.Tensor) -> None:
        before[read] = self.travels[read.fqn].unreduced(gradient, before.get(read))

    def _reduced_before(
        self,
        before: Mapping[StageRead, torch.Tensor],
        whole: Mapping[StageRead, torch.Tensor],
        parts: Mapping[str, torch.Tensor],
        loss: torch.Tensor,
    ) -> dict[StageRead, torch.Tensor]:
        """The reduced gradients of parameters that ``loss``, the last one, does not reach: they are complete in ``before``."""
        # No backward of a gather runs for these parameters, so their sums are reduced here.
        later, _ = reached([loss], whole)
        found = {}
        for read in (read for read in before if read not in later):
            part = parts[read.fqn]
            with self.namer.inside(read.fqn.rpartition(".")[0]), torch.no_grad():
                travel = self.travels[read.fqn]
                found[read] = travel.reduce(travel.to_reduce(None, before[read]), part.shape).to(part.dtype)
        return found

    def _summed(self, grads: Mapping[StageRead, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients by FQN. Those of a parameter that several stages read are added, from the last stage to the first."""
        found: dict[str, torch.Tensor] = {}
        for read in sorted(grads, key=lambda read: -read.stage):
            with self.namer.inside(read.fqn.rpartition(".")[0]), torch.no_grad():
                found[read.fqn] = found[read.fqn] + grads[read] if read.fqn in found else grads[read]
        return found

    def forward(self, leaves: Sequence[Any]) -> torch.Tensor:
        """The loss of one microbatch, as a share of the step's."""
        batch = pytree.tree_unflatten(list(leaves), self.spec)
        dtype = self.param_dtype  # to which floating inputs are cast, as FSDP2's root does
        cast = [x.to(dtype) if dtype and isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in leaves]
        inputs = pytree.tree_unflatten(cast, self.spec)
        output = self.split.call(self.model, inputs)
        if self.whole is not None:
            colwise = [fqn for fqn, style in self.forwards.parted.items() if style == "colwise"]
            refuse_parts(self.whole, output, colwise, self.parts.mesh.degree("tp"))
        loss: torch.Tensor = self.split.loss(self.loss, output, batch)
        refuse_other_buffers(self.model, self.buffers)
        refuse_other_loss(self.loss, output, loss)
        return loss / self.count if self.count > 1 else loss

    def lost_gradients(self) -> list[str]:
        """Trainable parameters that got no gradient, but get one where the model runs by itself, as eager mode runs it."""
        silent = [fqn for fqn in self.trainable if fqn not in self.used]
        if not silent:
            return []
        own = dict(self.model.named_parameters())
        with naming_user_frame(lambda: "running the model by itself, to see which parameters get a gradient,"):
            self.run_alone()
        found = [fqn for fqn in silent if own[fqn].grad is not None]
        for parameter in own.values():
            parameter.grad = None
        return found

    def first_rows(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Leaves of the first microbatch."""
        return next(microbatches(leaves, self.count))

    def run_alone(self) -> None:
        """Forward and backward of the first microbatch on whole parameters, not traced: gradients are in ``.grad`` then."""
        leaves = self.leaves_with(self.inputs[len(self.inputs) - len(self.tensors) :])
        with self.fake_mode, self.anchors.in_place(), uncompiled(), torch.autograd.set_multithreading_enabled(False):
            batch = pytree.tree_unflatten(self.first_rows(leaves), self.spec)
            output = self.split.call(self.model, batch)
            self.split.loss(self.loss, output, batch).backward()

    def _whole_shapes(self, batch: Sequence[torch.Tensor]) -> Shapes:
        """Shapes of what the model gives for a microbatch if it is not parted."""
        # Not of first_rows: whoever gives other inputs to a step of his own does so when this has been asked.
        with self.fake_mode, torch.no_grad(), naming_user_frame(lambda: "calling the model"), self.anchors.in_place():
            part = next(microbatches(self.leaves_with(batch), self.count))
            return shapes_of(self.split.call(self.model, pytree.tree_unflatten(part, self.spec)))
