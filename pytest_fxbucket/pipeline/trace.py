"""One forward as a flat graph of operators: traced from a model, or taken from a graph that somebody else traced.

Each node has a place, which it keeps whatever is rewritten later. A module's call lies between two places.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn

from pytest_fxbucket.capture.draws import draws_on_tape
from pytest_fxbucket.capture.model import fake_twin, fake_twins, in_modules, refuse_scripted
from pytest_fxbucket.capture.names import Call, NodeNamer, StageMarks, calls_watched, first_names
from pytest_fxbucket.capture.python_state import trace_settled
from pytest_fxbucket.capture.refusals import refuse_constants
from pytest_fxbucket.capture.unregistered import refuse_other_buffers
from pytest_fxbucket.compat import pytree, tracing
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode, KernelFakeMode, TorchDispatchMode
from pytest_fxbucket.compat.modules import hooks_off, uncompiled
from pytest_fxbucket.errors import CaptureError, StageError
from pytest_fxbucket.graph.effects import effects_of
from pytest_fxbucket.graph.modules import module_path, module_stack
from pytest_fxbucket.graph.ops import held_by
from pytest_fxbucket.pipeline.values import OutputPlace, leaves_of, parted
from pytest_fxbucket.user_frame import naming_user_frame

PLACE = "fxbucket_place"
"""Key of a node's place in its graph as it was traced."""
WITHOUT_GRAD = "fxbucket_without_grad"
"""Key of whether a node was traced where gradients were off."""


@dataclass(frozen=True)
class Forward:
    """One forward as a flat graph; the graph belongs to this object alone and may be rewritten."""

    graph_module: fx.GraphModule
    root: nn.Module
    """The module that has the parameters and buffers."""
    parameter_nodes: Mapping[fx.Node, str]
    """Nodes that are a parameter or buffer, with its first FQN."""
    batch: Mapping[fx.Node, str]
    """Nodes that are a tensor of the batch, each with its path in the arguments, in the order of the arguments."""
    signature: inspect.Signature
    leaves: Mapping[str, Any]
    """Leaves of the arguments by path; tensors are fake."""
    result: Any
    """What forward gives, with a :class:`~pytest_fxbucket.pipeline.values.OutputPlace` for each of the graph's outputs."""
    calls: Mapping[str, Sequence[Call]]
    """Calls of every module that ran, in order, by the module's FQN."""
    modules: Mapping[str, str]
    """Every FQN of a module, to the FQN that ``calls`` has for that module."""

    @cached_property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Parameters of the model by first FQN."""
        return dict(self.root.named_parameters())

    @cached_property
    def buffers(self) -> dict[str, torch.Tensor]:
        """Buffers of the model by first FQN."""
        return dict(self.root.named_buffers())


def trace_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, hooked: bool = False) -> Forward:
    """Trace ``model(*args, **kwargs)`` on fake tensors; the model is left as it was.

    ``hooked``: the model's own hooks around forward are traced, too.
    Raises :class:`CaptureError` for a model that cannot be traced, :class:`StageError` for arguments and results that a stage
    cannot take or give.
    """
    refuse_scripted(model)
    signature = inspect.signature(model.forward)
    leaves_of(signature, args, kwargs)  # refused before anything is traced
    # Keyword arguments in the order of the signature: inputs of the graph do not depend on how the call was written.
    order = [name for name in signature.parameters if name in kwargs]
    kwargs = {name: kwargs[name] for name in (*order, *sorted(kwargs.keys() - set(order)))}
    mode = KernelFakeMode(allow_non_fake_inputs=True)
    names = {id(tensor): fqn for fqn, tensor in (*model.named_parameters(), *model.named_buffers())}
    with in_modules(model, fake_twins(model, mode)), hooks_off(model, backward_alone=hooked):

        def traced() -> tuple[_Tracing, fx.GraphModule]:
            step = _Tracing(model, mode, args, kwargs)
            with mode, torch.enable_grad(), naming_user_frame(lambda: f"tracing {step.namer.where}"):
                graph_module = tracing.trace(step, [*step.held.values(), *step.tensors])
            refuse_constants(graph_module, model)
            return step, graph_module

        step, graph_module = trace_settled(model, traced, _Tracing.run_alone)
    # Before dead nodes are removed: the calls of modules were recorded as numbers of nodes in the graph as it was traced.
    for place, node in enumerate(graph_module.graph.nodes):
        node.meta[PLACE] = place
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    fqns, inputs = list(step.held), placeholders[len(step.held) :]
    held = dict(zip(placeholders, fqns, strict=False)) | _held_past_modules(graph_module, names)
    leaves = leaves_of(signature, *step.arguments)
    paths = {id(leaf): path for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    batch = {node: paths[id(tensor)] for node, tensor in zip(inputs, step.tensors, strict=True)}
    graph_module.graph.eliminate_dead_code(_stays)
    return Forward(graph_module, model, held, batch, signature, leaves, step.result, step.marks.calls, first_names(model))


class _Tracing:
    """Forward as a function of flat tensors: parameters, buffers, tensors of the arguments; gives those of its result."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.model, self.mode, self.namer = model, mode, NodeNamer(model)
        self.held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        # A fake for each leaf, even where one tensor is passed twice: another call may pass two.
        self.leaves = [fake_twin(mode, x) if isinstance(x, torch.Tensor) else x for x in leaves]
        self.tensors = [x for x in self.leaves if isinstance(x, torch.Tensor)]
        self.marks = StageMarks()
        self.result: Any = None

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, of fake tensors."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        return args, kwargs

    def __call__(self, *_: torch.Tensor) -> list[torch.Tensor]:
        # The inputs are not read: they are the very fakes that the model's modules and the arguments hold, and are traced
        # there.
        buffers = dict(self.model.named_buffers())

        def enter(fqn: str) -> None:
            self.marks.enter(len(tracing.current_graph().nodes))

        def leave(fqn: str) -> None:
            self.marks.leave(fqn, len(tracing.current_graph().nodes))

        with ExitStack() as inside:
            inside.enter_context(uncompiled())
            inside.enter_context(tracing.caches_unversioned())
            inside.enter_context(draws_on_tape())
            inside.enter_context(_own_backwards_refused(self.namer))
            inside.enter_context(self.namer.watching(self.model))
            inside.enter_context(calls_watched(self.model, enter, leave))
            inside.enter_context(_GradModes())
            args, kwargs = self.arguments
            self.result, tensors = parted(self.model(*args, **kwargs))
        refuse_other_buffers(self.model, buffers)
        for fqn, buffer in self.model.named_buffers():
            if buffer is not buffers[fqn]:
                raise CaptureError(
                    f"buffer {fqn} is replaced in forward, and a stage writes its own; write it in place, as with "
                    f"{fqn.rpartition('.')[2]}.copy_()"
                )
        return tensors

    def run_alone(self) -> None:
        """Forward by itself, not traced."""
        args, kwargs = self.arguments
        with self.mode, uncompiled():
            self.model(*args, **kwargs)


class _GradModes(TorchDispatchMode):
    """Marks nodes that are traced where gradients are off, so that autograd does not record them when a stage runs them."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        nodes = tracing.current_graph().nodes
        last = next(iter(reversed(nodes)), None)
        given = func(*args, **(kwargs or {}))
        for node in reversed(nodes) if not torch.is_grad_enabled() else ():
            # One call may have added several nodes, or none: all behind ``last`` are of this call.
            if node is last:
                break
            node.meta[WITHOUT_GRAD] = True
        return given


@contextmanager
def _own_backwards_refused(namer: NodeNamer) -> Iterator[None]:
    """While inside, an ``autograd.Function`` is refused: its backward cannot be told from the operators of its forward.

    ``_NoopSaveInputs`` is let through. Checkpoints of torch before 2.13 keep their inputs with it, and it has no backward.
    """
    apply: Any = vars(torch.autograd.Function)["apply"]

    def refuse(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if cls.__name__ == "_NoopSaveInputs":
            return apply.__get__(None, cls)(*args, **kwargs)
        use = "use_reentrant=False" if cls.__name__ == "CheckpointFunction" else "write it of torch's operators"
        raise CaptureError(
            f"module {namer.running or 'the root'} calls {cls.__name__}, an autograd.Function, whose backward the operators of "
            f"its forward do not tell; {use}"
        )

    with patch.object(torch.autograd.Function, "apply", classmethod(refuse)):
        yield


def _stays(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or effects_of(node).acts


def _held_past_modules(graph_module: fx.GraphModule, names: Mapping[int, str]) -> dict[fx.Node, str]:
    """Parameters and buffers that forward reads past their modules, as from an RNN's lists, so that they became attributes."""
    found = {}
    for node in graph_module.graph.find_nodes(op="get_attr"):
        tensor = held_by(graph_module, str(node.target))
        if id(tensor) in names:
            found[node] = names[id(tensor)]
        elif isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            raise CaptureError(
                f"{node.name} is a tensor that requires grad, but no parameter of the model; make it one (torch.nn.Parameter, "
                "in an attribute of its module), or detach it"
            )
    return found


# Graphs that somebody else traced: with parameters and buffers as attributes, and module stacks on nodes. Nobody watched the
# calls of modules, so they are told by the stacks.


def take_graph(given: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
    """A copy of ``given`` as a forward of ``args`` and ``kwargs``; the copy shares the tensors of ``given``.

    Raises :class:`StageError` for a graph that is not flat, that has no module stack on any node, or that lacks example values.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in given.graph.nodes:
        if node.op == "call_module" and node.target == "_guards_fn":  # torch.export's check of the arguments
            continue
        if node.op == "call_module":
            raise StageError(f"the graph calls module {node.target} as a whole, expected a flat graph of operators")
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph_module = fx.GraphModule(given, graph)
    nodes = list(graph.nodes)
    for place, node in enumerate(nodes):
        node.meta[PLACE] = place
    calls = _calls_by_stacks(nodes)
    if not calls:
        raise StageError(
            "no node of the graph says which module it is of, so there is no place to cut at; trace it with module stacks "
            '(meta["nn_module_stack"]), as torch.export does'
        )
    if bare := [node.name for node in nodes if node.op in ("call_function", "placeholder") and "val" not in node.meta]:
        raise StageError(f'node {bare[0]} of the graph has no example value (meta["val"]), so what crosses is not known')
    tensors = {id(t): fqn for fqn, t in (*given.named_parameters(), *given.named_buffers())}
    attributes = {node: held_by(given, str(node.target)) for node in graph.find_nodes(op="get_attr")}
    held = {node: tensors[id(tensor)] for node, tensor in attributes.items() if id(tensor) in tensors}
    signature = inspect.signature(given.forward)
    leaves = leaves_of(signature, args, kwargs)
    inputs = graph.find_nodes(op="placeholder")
    if len(inputs) != len(leaves):
        raise StageError(f"the graph takes {len(inputs)} inputs, but example_inputs have {len(leaves)} leaves")
    batch = {node: path for node, (path, leaf) in zip(inputs, leaves.items(), strict=True) if isinstance(leaf, torch.Tensor)}
    result, outputs = _placed(graph.output_node().args[0], given.graph.process_outputs)
    graph.output_node().args = (outputs,)
    graph.eliminate_dead_code(_stays)
    names = {fqn: fqn for fqn in calls}
    return Forward(graph_module, given, held, batch, signature, leaves, result, calls, names)


def _placed(returned: Any, processed: Callable[[Any], Any]) -> tuple[Any, list[fx.Node]]:
    """The result of a graph with a :class:`OutputPlace` for each node, and those nodes in order.

    ``processed`` is the graph's own step from the values that it returns to the containers of its result.
    """
    nodes: list[fx.Node] = []

    def place(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            nodes.append(leaf)
            return OutputPlace(len(nodes) - 1)
        return leaf

    def plain(value: Any) -> Any:
        # Nodes hold their arguments in fx's immutable lists and dicts, which a result is not to have.
        if isinstance(value, (list, tuple)):
            made = [plain(item) for item in value]
            return made if isinstance(value, list) else tuple(made)
        return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else place(value)

    return processed(plain(returned)), nodes


def _calls_by_stacks(nodes: Sequence[fx.Node]) -> dict[str, list[Call]]:
    """Calls of modules, told by module stacks: nodes of one call lie side by side, but for inputs and attributes.

    ``torch.export`` marks the second and later calls of a module by a number behind ``@`` in the keys of its stacks.
    """
    calls: dict[str, list[Call]] = {}
    going: dict[str, str] = {}
    for place, node in enumerate(nodes):
        if node.op in ("placeholder", "get_attr", "output") or not (stack := module_stack(node)):
            continue
        numbers = [key.partition("@")[2] for key in node.meta.get("nn_module_stack", {})] or [""] * len(stack)
        now = {".".join(module_path(name)): number for (name, *_), number in zip(stack, numbers, strict=True)}
        for fqn, number in now.items():
            if going.get(fqn) != number:
                calls.setdefault(fqn, []).append((place, place + 1))
            else:
                calls[fqn][-1] = (calls[fqn][-1][0], place + 1)
        going = now
    return calls
