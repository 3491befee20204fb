"""Traces one training step of a sharded model, forward, loss and backward, into one joint graph; no GPU, no processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.capture.blame import blamed
from pytest_fxbucket.capture.names import NodeNamer
from pytest_fxbucket.capture.reshard import gather_again_in_backward
from pytest_fxbucket.capture.roles import MeshDim, Parameter, StepGraph, Value
from pytest_fxbucket.capture.shard import ShardPolicy, gathered_on_read, shard_rows
from pytest_fxbucket.compat import pytree, trace
from pytest_fxbucket.errors import CaptureError

if TYPE_CHECKING:
    from torch import fx, nn

    from pytest_fxbucket.compat.fake_tensors import FakeTensorMode

LossFn = Callable[[Any, Any], torch.Tensor]


def capture_step(
    model: nn.Module,
    batch: Any,
    loss: LossFn,
    policy: ShardPolicy,
    fake_mode: FakeTensorMode,
    *,
    rank: int,
    reshard_after_forward: bool,
) -> StepGraph:
    """Trace ``loss(model(batch), batch)`` and the gradient of every trainable parameter into one joint graph.

    ``model`` was built under ``fake_mode``. ``batch`` is a tuple of positional or a dict of keyword inputs, real tensors.
    Inputs of the graph: local shards of the parameters, buffers, tensors of the batch. Outputs: the loss, then the sharded,
    averaged gradients in registration order. Raises :class:`CaptureError` for what cannot be traced.
    """
    step = _JointStep(model, batch, loss, policy, fake_mode)
    with fake_mode, blamed(lambda: f"tracing {step.namer.where}"):
        graph_module = trace.trace(step, step.inputs)
    _refuse_constants(graph_module, model)
    if reshard_after_forward:
        gather_again_in_backward(graph_module.graph)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return StepGraph(
        graphs={"joint": graph_module},
        inputs={"joint": tuple(step.input_values)},
        outputs={"joint": (Value("loss", "", (), None), *step.grad_values)},
        parameters=tuple(step.parameters),
        modules=tuple(fqn for fqn, _ in model.named_modules()),
        mesh=(MeshDim("dp_shard", policy.ranks),),
        rank=rank,
    )


def describe_parameters(model: nn.Module, ranks: int) -> list[Parameter]:
    """Parameters of ``model`` in registration order. Raises :class:`CaptureError` for one without a dimension to shard."""
    names: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    described = []
    for fqn, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise CaptureError(f"parameter {fqn} has no dimension to shard; give it the shape (1,)")
        aliases = tuple(name for name in names[id(parameter)] if name != fqn)
        shape = tuple(parameter.shape)
        shard_shape = (shard_rows(shape[0], ranks), *shape[1:])
        described.append(Parameter(fqn, aliases, shape, shard_shape, parameter.dtype, parameter.requires_grad))
    return described


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call ``model`` with a tuple of positional or a dict of keyword inputs."""
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def cast_inputs(batch: Sequence[Any], dtype: torch.dtype | None) -> list[Any]:
    """Floating tensors among ``batch`` cast to ``dtype``, as FSDP2's root does with its inputs; the rest as it is."""
    return [x.to(dtype) if dtype and isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in batch]


class _JointStep:
    """Forward, loss and backward as one function of flat tensors: shards, then buffers, then the batch."""

    def __init__(self, model: nn.Module, batch: Any, loss: LossFn, policy: ShardPolicy, fake_mode: FakeTensorMode) -> None:
        self.model, self.loss, self.policy = model, loss, policy
        self.namer = NodeNamer(model)
        self.parameters = describe_parameters(model, policy.ranks)
        self.trainable = [p.fqn for p in self.parameters if p.trainable]
        self.used: list[str] = []
        paths, self.spec = pytree.tree_flatten_with_path(batch)
        self.leaves = [leaf for _, leaf in paths]
        self.tensors = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.buffers = dict(model.named_buffers())
        with fake_mode:
            shards = [torch.empty(p.shard_shape, dtype=p.dtype, requires_grad=p.trainable) for p in self.parameters]
        fakes = [fake_mode.from_tensor(self.leaves[i]) for i in self.tensors]
        self.inputs = [*shards, *self.buffers.values(), *fakes]
        names = [("param", p.fqn) for p in self.parameters] + [("buffer", fqn) for fqn in self.buffers]
        names += [("batch", pytree.keystr(paths[i][0])) for i in self.tensors]
        self.input_values = [
            Value(role, fqn, tuple(tensor.shape), tensor.dtype)  # type: ignore[arg-type]
            for (role, fqn), tensor in zip(names, self.inputs, strict=True)
        ]

    @property
    def grad_values(self) -> list[Value]:
        """The gradients among the outputs, in their order."""
        by_fqn = {p.fqn: p for p in self.parameters}
        return [Value("grad", fqn, by_fqn[fqn].shard_shape, by_fqn[fqn].dtype) for fqn in self.used]

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        shards = dict(zip((p.fqn for p in self.parameters), inputs, strict=False))
        buffers = dict(zip(self.buffers, inputs[len(shards) :], strict=False))
        loss = self._forward(shards, buffers, inputs[len(shards) + len(buffers) :])
        self.namer.start_backward(loss)
        grads = torch.autograd.grad(loss, [shards[fqn] for fqn in self.trainable], allow_unused=True)
        self.namer.flush()
        self.used = [fqn for fqn, grad in zip(self.trainable, grads, strict=True) if grad is not None]
        return [loss, *(grad for grad in grads if grad is not None)]

    def _forward(
        self, shards: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        leaves = list(self.leaves)
        for i, tensor in zip(self.tensors, tensors, strict=True):
            leaves[i] = tensor
        batch = pytree.tree_unflatten(leaves, self.spec)
        inputs = pytree.tree_unflatten(cast_inputs(leaves, self.policy.param_dtype), self.spec)
        with gathered_on_read(self.model, shards, self.policy, self.namer), self.namer.watching(self.model):
            output = call_model(self.model, inputs)
            loss = self.loss(output, batch)
        self._refuse_new_buffers()
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            gave = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else f"a value of type {type(loss).__name__}"
            )
            raise CaptureError(f"the loss must be a scalar tensor, but [model] loss gave {gave}")
        if not loss.requires_grad:
            raise CaptureError("the loss does not depend on any trainable parameter, so there is no step to check")
        return loss

    def _refuse_new_buffers(self) -> None:
        """A buffer that forward replaces would keep its old value in the graph."""
        for fqn, buffer in self.model.named_buffers():
            if buffer is not self.buffers.get(fqn):
                raise CaptureError(f"buffer {fqn} is replaced in forward; write it in place, as with copy_")


def _refuse_constants(graph_module: fx.GraphModule, model: nn.Module) -> None:
    """A tensor that the model holds, but as no input of the step, has no value under tracing: the graph could not run."""
    parameters = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    for node in graph_module.graph.nodes:
        if node.op != "get_attr" or not trace.is_fake(getattr(graph_module, node.target)):
            continue
        fqn = parameters.get(id(getattr(graph_module, node.target)))
        stack = list(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or [""])
        where = f"module {stack[-1]}" if stack[-1] else "the root module or the loss"
        if fqn is not None:
            raise CaptureError(f"{where} reads parameter {fqn} past its module's attribute, so it would not be gathered")
        raise CaptureError(
            f"{where} uses a tensor that is neither parameter, buffer nor input of the step; register it with register_buffer"
        )
