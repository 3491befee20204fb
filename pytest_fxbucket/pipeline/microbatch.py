"""One microbatch on whole parameters as one graph whose nodes know their stages, and graphs that gather and reduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pytest_fxbucket.capture.backward import StageRead, backward_in_forward
from pytest_fxbucket.capture.batch import microbatches
from pytest_fxbucket.capture.draws import draws_on_tape
from pytest_fxbucket.capture.from_plan import ModelTraced
from pytest_fxbucket.capture.joint import JointStep, traced_joint
from pytest_fxbucket.capture.names import NodeNamer, StageMarks, first_names
from pytest_fxbucket.capture.parallel.unshard import ParameterTravel, Reader
from pytest_fxbucket.capture.unregistered import keep_buffers
from pytest_fxbucket.compat import tracing
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.graph.ops import returned
from pytest_fxbucket.step.roles import Parameter, Value


@dataclass(frozen=True)
class Microbatch:
    """Forward and backward of one microbatch."""

    graph_module: fx.GraphModule
    """Takes whole parameters, buffers, what the model holds elsewhere, and the rows of the batch; gives the loss, as a share of
    the step's, and the gradients of :attr:`reads`, not reduced."""
    inputs: tuple[Value, ...]
    reads: tuple[StageRead, ...]
    gathered: tuple[StageRead, ...]
    """Every parameter that a stage reads, in order of first reads."""
    parameters: tuple[Parameter, ...]
    travels: Mapping[str, ParameterTravel]
    marks: StageMarks
    count: int
    """How many microbatches a step has."""
    modules: Mapping[str, str]
    """Every FQN of a module, to the FQN that ``marks`` have for that module."""
    model: Any


def trace_microbatch(model: ModelTraced) -> Microbatch:
    """Trace the first microbatch of ``model``; the others are alike.

    Raises :class:`CaptureError` for a step that cannot be in stages.
    """
    step, graph_module = traced_joint(model.built, lambda: model.step(_MicrobatchStep))
    return Microbatch(
        graph_module,
        tuple(step.input_values),
        tuple(step.reduced),
        tuple(step.gathered),
        tuple(step.parameters),
        step.travels,
        step.marks,
        step.count,
        first_names(model.built),
        model.built,
    )


class _MicrobatchStep(JointStep):
    """The step's first microbatch as a function of flat tensors, with whole parameters in place of shards."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.anchors.states:
            raise CaptureError(
                f"{next(iter(self.anchors.states))} is state of an overridden module, which microbatches in pipeline stages "
                "would change out of turn; leave it out of [[override]], or [pipeline] out"
            )
        self.reduced: list[StageRead] = []
        self.gathered: list[StageRead] = []
        # Inputs of a whole step are shards and all of the batch. A microbatch takes what ``unshard`` has gathered once a step,
        # and its own rows: tensors by themselves, not views of the batch, in the strides that the rows have there.
        before_batch = len(self.inputs) - len(self.tensors)
        with self.fake_mode:
            whole = [self._whole(parameter) for parameter in self.parameters]
            rows = self.inputs[before_batch:]
            rows = list(next(microbatches(rows, self.count)))
            rows = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in rows]
        self.inputs = [*whole, *self.inputs[len(whole) : before_batch], *rows]
        names = [(value.role, value.fqn) for value in self.input_values]
        self.input_values = [
            Value("whole" if role == "param" else role, fqn, tuple(tensor.shape), tensor.dtype)
            for (role, fqn), tensor in zip(names, self.inputs, strict=True)
        ]

    def _whole(self, parameter: Parameter) -> torch.Tensor:
        floating = parameter.dtype.is_floating_point
        # Whole over the data-parallel ranks only: what is sharded over tp or ep stays this rank's part.
        dtype = self.param_dtype if self.param_dtype is not None and floating else parameter.dtype
        return torch.empty(parameter.local_shape, dtype=dtype, requires_grad=parameter.trainable)

    def first_rows(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """All of ``leaves``: they are the rows of one microbatch."""
        return leaves

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The microbatch's share of the loss, and the gradients of :attr:`reduced`."""
        # Parameters are the first inputs, so the shorter list ends the zip in the right place.
        whole = dict(zip((p.fqn for p in self.parameters), inputs, strict=False))
        leaves = self.leaves_with(inputs[len(inputs) - len(self.tensors) :])
        reader = _WholeReader(whole, self.travels, self.namer, {}, False, self.hooks, True)
        with draws_on_tape(), self.running(reader):
            with backward_in_forward(reader.whole, _refuse_early):
                loss = self.forward(leaves)
            self.namer.start_backward(loss)
            read = {read: tensor for read, tensor in reader.whole.items() if tensor.requires_grad}
            found = torch.autograd.grad(loss, list(read.values()), allow_unused=True)
            self.namer.end_backward()
            keep_buffers(self.model, self.buffers, self.namer)
        # A parameter that the loss does not depend on is gathered, but has no gradient to reduce.
        self.gathered = list(reader.whole)
        self.reduced = [one for one, gradient in zip(read, found, strict=True) if gradient is not None]
        return [loss, *(gradient for gradient in found if gradient is not None)]


class _WholeReader(Reader):
    """Gathers nothing: parameters are whole already, and each stage gets a leaf of its own of each that it reads."""

    def _gathered(self, read: StageRead) -> torch.Tensor:
        # With a leaf for each stage autograd keeps the gradients of a tied parameter apart, one for each stage.
        whole = self._parts[read.fqn]
        return whole.detach().requires_grad_(whole.requires_grad)


def _refuse_early(read: StageRead, gradient: torch.Tensor) -> None:
    raise CaptureError(
        f"forward calls backward() itself, which gives {read.fqn} a gradient before the schedule's own backward; pipeline "
        "stages run backward where their schedule says, so give the loss of the whole microbatch"
    )


# Graphs that run once a step: what gathers the parameters of a stage, and what reduces their gradients.


def trace_unshard(
    microbatch: Microbatch, reads: Sequence[StageRead]
) -> tuple[fx.GraphModule, tuple[Value, ...], tuple[Value, ...]]:
    """Trace the graph that gathers the parameters of ``reads``: from shards to whole parameters, in order."""
    by_fqn = {parameter.fqn: parameter for parameter in microbatch.parameters}
    parameters = [by_fqn[read.fqn] for read in reads]

    def gather(fqn: str, part: torch.Tensor) -> torch.Tensor:
        return microbatch.travels[fqn].gather(part)

    inputs = [Value("param", one.fqn, one.shard_shape, one.dtype) for one in parameters]
    with FakeTensorMode():
        parts = [torch.empty(one.shard_shape, dtype=one.dtype) for one in parameters]
    graph_module = _each(microbatch, inputs, parts, gather, backward=False)
    return graph_module, tuple(inputs), _outputs("whole", graph_module, parameters)


def trace_reduce(
    microbatch: Microbatch, reads: Sequence[StageRead]
) -> tuple[fx.GraphModule, tuple[Value, ...], tuple[Value, ...]]:
    """Trace the graph that reduces the gradients of ``reads``: from sums over microbatches to shards of averages over ranks."""
    by_fqn = {parameter.fqn: parameter for parameter in microbatch.parameters}
    parameters = [by_fqn[read.fqn] for read in reads]

    def reduce(fqn: str, gradient: torch.Tensor) -> torch.Tensor:
        parameter, travel = by_fqn[fqn], microbatch.travels[fqn]
        return travel.reduce(travel.to_reduce(None, gradient), torch.Size(parameter.shard_shape)).to(parameter.dtype)

    # The dtype of a sum is found by adding fakes as ranks add microbatches: the first gradient is cast, a second one is added.
    _, *gradients = returned(microbatch.graph_module.graph.output_node())
    made = {read: node.meta["val"] for read, node in zip(microbatch.reads, gradients, strict=True)}
    sums = []
    for read in reads:
        travel, gradient = microbatch.travels[read.fqn], made[read]
        with gradient.fake_mode:
            total = travel.unreduced(gradient)
            if travel.summed_over is not None and microbatch.count == 1 and total.dtype != gradient.dtype:
                raise CaptureError(
                    f"the gradient of {read.fqn} is summed over tp before it is cast to reduce_dtype, and stages add "
                    "microbatches in reduce_dtype; with [pipeline] and one microbatch leave reduce_dtype out, or use "
                    "[step] microbatches = 2"
                )
            sums.append(travel.unreduced(gradient, total) if microbatch.count > 1 else total)
    inputs = [Value("unreduced", one.fqn, tuple(x.shape), x.dtype) for one, x in zip(parameters, sums, strict=True)]
    graph_module = _each(microbatch, inputs, sums, reduce, backward=True)
    return graph_module, tuple(inputs), _outputs("grad", graph_module, parameters)


def _each(
    microbatch: Microbatch,
    inputs: Sequence[Value],
    tensors: Sequence[Any],
    function: Callable[[str, torch.Tensor], torch.Tensor],
    *,
    backward: bool,
) -> fx.GraphModule:
    """Trace ``function`` on each of ``inputs``, whose fakes are ``tensors``; nodes are named after the parameter's module."""
    namer = NodeNamer(microbatch.model)

    def all_of_them(*tensors: torch.Tensor) -> list[torch.Tensor]:
        if backward:
            namer.start_backward(tensors[0])
        given = []
        for value, tensor in zip(inputs, tensors, strict=True):
            with namer.inside(value.fqn.rpartition(".")[0]), torch.no_grad():
                given.append(function(value.fqn, tensor))
        return given

    with tensors[0].fake_mode:
        return tracing.trace(all_of_them, tensors)


def _outputs(role: Any, graph_module: fx.GraphModule, parameters: Sequence[Parameter]) -> tuple[Value, ...]:
    values = [node.meta["val"] for node in returned(graph_module.graph.output_node())]
    return tuple(Value(role, p.fqn, tuple(v.shape), v.dtype) for p, v in zip(parameters, values, strict=True))
