"""Records a user's whole step on fake tensors: its operators, its reads and writes of ``.grad``, and the running modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from pytest_fxbucket.capture.names import NodeNamer
from pytest_fxbucket.capture.optimizers.recorder import Recorder
from pytest_fxbucket.capture.refusals import in_place, refuse_in_place, refuse_unwritable
from pytest_fxbucket.compat import pytree, tracing
from pytest_fxbucket.compat.fake_tensors import FakeTensor, FakeTensorMode
from pytest_fxbucket.errors import CaptureError

_ATEN = torch.ops.aten
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_TENSOR: Any = torch.Tensor
_GRAD, _DATA = _TENSOR.grad, _TENSOR.data
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_C10D = "torch.distributed.distributed_c10d"
_GRADIENT_OF = "fxbucket_gradient_of"
"""Key in the meta of a node that is a parameter's gradient: the FQN of the parameter's module."""
_VIEWS = {
    _ATEN.transpose_.default: _ATEN.transpose.int,
    _ATEN.t_.default: _ATEN.t.default,
    _ATEN.squeeze_.default: _ATEN.squeeze.default,
    _ATEN.squeeze_.dim: _ATEN.squeeze.dim,
    _ATEN.squeeze_.dims: _ATEN.squeeze.dims,
    _ATEN.unsqueeze_.default: _ATEN.unsqueeze.default,
    _ATEN.as_strided_.default: _ATEN.as_strided.default,
}
"""Operators that make another shape in place, and those that give it as a view."""


class StepRecorder(Recorder):
    """Records operators as nodes of a graph; calls ``on_node`` after each, and records nothing while it is ``paused``.

    A call with a tensor subclass, such as a DTensor, is left to the subclass, whose inner operators are recorded. Raises
    :class:`CaptureError` for operators that a graph cannot have.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__(mode)
        self.paused = False
        self.on_node: Callable[[], None] = lambda: None
        self.constants: dict[str, torch.Tensor] = {}
        """Tensors that the step makes from lists of numbers, by the attribute of the graph module that will hold them."""

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Record nothing of the block."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def late_input(self, name: str, fake: torch.Tensor) -> None:
        """Make ``fake`` an input, even when the graph already has nodes."""
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first) if first is not None else nullcontext():
            self.input(name, fake)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        refuse_in_place(func)
        if self.paused or func.namespace == "prim":  # prim::device and the like ask for metadata, not for data
            with self._mode:
                return func(*args, **(kwargs or {}))
        refuse_unwritable(func)
        # native_batch_norm writes running statistics that its schema does not declare, so that it has no functional twin. The
        # operator in its place computes the same, and declares them.
        if func is _ATEN.native_batch_norm.default and args[3] is not None and args[5]:
            func = _ATEN._native_batch_norm_legit.default
        # torch.tensor([1, 2]) arrives as a real tensor that is lifted. Scalars are left to the base class, as numbers.
        if func is _ATEN.lift_fresh.default and not isinstance(args[0], FakeTensor) and args[0].dim():
            return self._attribute(args[0])
        # detach_ has that tag, too, but leaves the shape alone.
        if torch.Tag.inplace_view in func.tags and func is not _ATEN.detach_.default:
            return self._seen_otherwise(func, args, kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.on_node()
        return result

    def _seen_otherwise(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Record ``func``, which gives a tensor another shape in place, as torch's GRU and pooling do: a view of it before."""
        view = _VIEWS.get(func)
        if view is None:
            raise CaptureError(
                f"it calls {func}, which makes another shape of a tensor in place; use the form that gives a view"
            )
        tensor = args[0]
        node = self.graph.call_function(view, self._plain(args), self._plain(kwargs))
        with self._mode:
            self.node(tensor).meta["val"] = _ATEN.alias.default(tensor)  # of the shape that it has until now
            func(*args, **kwargs)
        self._remember(tensor, node)
        self.on_node()
        return tensor  # type: ignore[no-any-return]  # args of torch's are untyped

    def hold(self, value: torch.Tensor) -> str:
        """Keep ``value`` beside the graph; the name under which it is kept."""
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        return name

    def _attribute(self, value: torch.Tensor) -> torch.Tensor:
        name = self.hold(value)
        with self._mode:
            fake = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
        self._remember(fake, self.graph.create_node("get_attr", name))
        self.on_node()
        # Each call makes a tensor anew, which may be returned and written.
        made: torch.Tensor = super().__torch_dispatch__(_ATEN.clone.default, (), (fake,))
        self.on_node()
        return made


class StepFunctions(TorchFunctionMode):
    """Watches calls of torch's Python functions, since the recorder sees only the operators below them.

    Real tensors among the arguments, such as parameters that the step's closure holds, are replaced by their fake ``twins``,
    which are looked up by identity. ``gradients`` is told of each ``.grad`` that is read, set or dropped. Refused are writes to
    ``.data``, collectives in place, and ``item()`` outside of an optimizer, which reads its step counters with it.
    """

    def __init__(self, recorder: StepRecorder, twins: Mapping[int, torch.Tensor], gradients: Gradients) -> None:
        super().__init__()
        self._recorder, self._twins, self._gradients = recorder, twins, gradients
        self.in_optimizer = False
        self.losses: list[torch.Tensor] = []
        """Tensors whose backward was run."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.twinned(args), self.twinned(kwargs or {})
        # Our groups on ranks are written in Python: they would be given fake tensors, and no operator tells of the call.
        if getattr(func, "__module__", "") == _C10D:
            raise in_place(f"torch.distributed.{func.__name__}")
        if self._recorder.paused:
            return func(*args, **kwargs)
        if func is torch.Tensor.item:
            if not self.in_optimizer:
                raise CaptureError(
                    "it asks for the value of a tensor (item()), which is known only when the step runs; return the tensor"
                )
            return self._recorder.number(*args)
        # Accessors of a property are new objects each time, so they are compared by ``==``.
        if func == _DATA.__set__:
            raise CaptureError("it sets .data of a tensor, which no operator tells of; write it with copy_")
        if func in (_GRAD.__set__, _GRAD.__delete__):
            self._gradients.set(args[0], args[1] if len(args) > 1 else None)
        if func is torch.nn.functional.embedding and kwargs.get("sparse") and kwargs.get("padding_idx") not in (None, -1):
            raise CaptureError(
                "it looks up in an embedding that has sparse=True and a padding_idx, whose gradient has as many rows as values "
                "say; leave sparse=True out"
            )
        if func in _BACKWARD:
            self.losses.extend(pytree.tensors_in(args[:1]))
        result = func(*args, **kwargs)
        if func == _GRAD.__get__:
            self._gradients.read(args[0], result)
        return result

    def twinned(self, value: Any) -> Any:
        """``value`` with fake twins in place of real tensors."""
        return pytree.map_tensors(lambda tensor: self._twins.get(id(tensor), tensor), value)


class Gradients:
    """Follows ``.grad`` of each parameter through one step: whether the gradient from before matters, and which one is left.

    A step that begins with ``zero_grad()`` does not care whether there were gradients, so that one graph does for its first
    call and for all later ones. A step that reads, accumulates into or keeps a gradient from before does care. ``parameters``
    are the fake twins by FQN; ``on_read(fqn, gradient)`` is called for each gradient that is read.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], on_read: Callable[[str, torch.Tensor], None]) -> None:
        self._parameters, self._on_read = parameters, on_read
        self._fqns = {id(parameter): fqn for fqn, parameter in parameters.items()}
        self._before = {fqn: parameter.grad for fqn, parameter in parameters.items()}
        self._versions = {fqn: _version(grad) for fqn, grad in self._before.items()}
        self._counts: dict[str, bool] = {}
        """By FQN whether the gradient from before matters. The first access decides, so only ``setdefault`` writes here."""

    def set(self, parameter: torch.Tensor, value: Any) -> None:
        """``parameter.grad`` is about to become ``value``."""
        fqn = self._fqns.get(id(parameter))
        # Dropped first of all, the gradient from before had no effect. If backward has put another one in its place without
        # being seen here, that one may contain it.
        if fqn is not None and value is None:
            self._counts.setdefault(fqn, parameter.grad is not self._before[fqn])
        elif fqn is not None:
            self._counts.setdefault(fqn, True)

    def read(self, parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
        """``parameter.grad`` was read, and is ``gradient``."""
        fqn = self._fqns.get(id(parameter))
        if fqn is None:
            return
        self._counts.setdefault(fqn, True)
        if gradient is not None:
            self._on_read(fqn, gradient)

    def counting(self) -> dict[str, bool]:
        """Whether a parameter had a gradient before the step, by FQN; only for parameters where that makes a difference."""
        counts = (fqn for fqn in self._parameters if self._counts.get(fqn, self._has_changed(fqn)))
        return {fqn: self._before[fqn] is not None for fqn in counts}

    def _has_changed(self, fqn: str) -> bool:
        """Whether the step made the gradient anew, or added to it: autograd adds to one that is there in place."""
        gradient = self._parameters[fqn].grad
        return gradient is not self._before[fqn] or _version(gradient) != self._versions[fqn]

    def left(self) -> dict[str, torch.Tensor | None]:
        """Gradients after the step, by FQN, None where it dropped one; without those that are the same tensor as before."""
        cleared = {fqn for fqn, p in self._parameters.items() if p.grad is None and fqn in self._counts}
        changed = {fqn: p.grad for fqn, p in self._parameters.items() if p.grad is not self._before[fqn]}
        return changed | dict.fromkeys(cleared)


def _version(gradient: torch.Tensor | None) -> int:
    return gradient._version if gradient is not None else 0


@contextmanager
def watching_zero_grad(
    model: nn.Module, optimizers: Iterable[Optimizer], recorder: StepRecorder, gradients: Gradients
) -> Iterator[None]:
    """While inside, ``zero_grad()`` of modules and optimizers tells ``gradients`` of all parameters, also those without one."""

    # Torch's own code reads .grad and drops only what is there. Told beforehand, the drop is the first access, not the read.
    def watched(owner: Any) -> Callable[..., None]:
        zero_grad: Callable[[bool], None] = owner.zero_grad

        def zero(set_to_none: bool = True) -> None:
            is_module = isinstance(owner, torch.nn.Module)
            parameters = owner.parameters() if is_module else (p for group in owner.param_groups for p in group["params"])
            with recorder.unseen():
                for parameter in parameters if set_to_none else ():
                    gradients.set(parameter, None)
            zero_grad(set_to_none)

        return zero

    with ExitStack() as inside:
        owners: list[Any] = [*model.modules(), *optimizers]
        for owner in owners:
            inside.enter_context(patch.object(owner, "zero_grad", watched(owner)))
        yield


class StepNamer(NodeNamer):
    """Names nodes by their modules, in a step that may call the model and its backward any number of times in any order.

    :meth:`flush` is called after every node. A node of backward gets its module from the autograd node that is running, so it
    does not matter who started backward. ``owners`` has the FQN of each parameter's module, by the parameter's identity.
    """

    def __init__(self, model: nn.Module, graph: fx.Graph, owners: Mapping[int, str]) -> None:
        super().__init__(model, graph)
        self._parameters = owners

    def is_gradient(self, node: fx.Node, fqn: str) -> None:
        """``node`` is the gradient of a parameter of the module ``fqn``."""
        node.meta.setdefault(_GRADIENT_OF, fqn)

    def flush(self) -> None:
        """Name the nodes that were added since the last call."""
        running = tracing.current_autograd_node()
        self._backward = None
        if running is not None:
            # The node that accumulates into .grad belongs to no module, but has its parameter as ``variable``.
            accumulated = self._parameters.get(id(getattr(running, "variable", None)))
            self._backward = self._owner(running)[0] if accumulated is None else accumulated
        super().flush()

    def _name(self, node: fx.Node) -> None:
        """Name ``node``; one made from a gradient by a chain of nodes with one input each belongs to the gradient's module."""
        # Outside of modules and of backward, the step itself works on gradients, as where it all-reduces each and waits for it.
        # Such nodes are named as backward nodes of the parameter's module, found by going up the chain.
        before, made_of = self._backward, [node]
        if before is None and len(self._stack) == 1:
            while len(made_of) == 1 and _GRADIENT_OF not in made_of[0].meta:
                made_of = made_of[0].all_input_nodes
            if len(made_of) == 1:
                self._backward = str(made_of[0].meta[_GRADIENT_OF])
        super()._name(node)
        self._backward = before
