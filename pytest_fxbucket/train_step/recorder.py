"""Records a user's whole step: forward, backward, optimizers on fake tensors, with stand-ins where a real one turns up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from pytest_fxbucket.capture.optimizers.recorder import Recorder
from pytest_fxbucket.compat.fake_tensors import FakeTensor, FakeTensorMode
from pytest_fxbucket.errors import CaptureError

if TYPE_CHECKING:
    from pytest_fxbucket.train_step.gradients import Gradients

_ATEN = torch.ops.aten
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_TENSOR: Any = torch.Tensor
_GRAD, _DATA = _TENSOR.grad, _TENSOR.data
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class StepRecorder(Recorder):  # type: ignore[no-untyped-call]  # __init_subclass__
    """A recorder that names nodes as they come, leaves tensor subclasses to take themselves apart, and can be paused."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__(mode)
        self.paused = False
        self.on_node: Callable[[], None] = lambda: None
        self.constants: dict[str, torch.Tensor] = {}
        """Tensors that the step makes of Python numbers, by the graph's attribute."""

    def late_input(self, name: str, fake: torch.Tensor) -> None:
        """Make ``fake`` an input though the graph has begun."""
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first) if first is not None else nullcontext():
            self.input(name, fake)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        if self.paused or func.namespace == "prim":
            with self._mode:
                return func(*args, **(kwargs or {}))
        _refuse(func)
        if func is _ATEN.native_batch_norm.default and args[3] is not None and args[5]:
            func = _ATEN._native_batch_norm_legit.default
        if func is _ATEN.lift_fresh.default and not isinstance(args[0], FakeTensor) and args[0].dim():
            return self._attribute(args[0])
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.on_node()
        return result

    def hold(self, value: torch.Tensor) -> str:
        """Keep ``value`` beside the graph, under the name that is given."""
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        return name

    def _attribute(self, value: torch.Tensor) -> torch.Tensor:
        name = self.hold(value)
        with self._mode:
            fake = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
        self._remember(fake, self.graph.create_node("get_attr", name))
        self.on_node()
        return fake


def _refuse(func: Any) -> None:
    if func.namespace == "c10d":
        raise CaptureError(
            f"it calls {func}, which works in place and behind autograd's back; use torch.distributed._functional_collectives"
        )
    if torch.Tag.inplace_view in func.tags and func is not _ATEN.detach_.default:
        raise CaptureError(f"it calls {func}, which makes another shape of a tensor in place; use the form that gives a view")


class StepFunctions(TorchFunctionMode):
    """Puts stand-ins in the place of real tensors that a step holds itself, and watches what no operator tells.

    That are gradients that are read, set and dropped, the tensors whose backward is run, and numbers taken from tensors, which
    only an optimizer may (its step counters).
    """

    def __init__(self, recorder: StepRecorder, twins: Mapping[int, torch.Tensor], gradients: Gradients) -> None:
        super().__init__()
        self._recorder, self._twins, self._gradients = recorder, twins, gradients
        self.in_optimizer = False
        self.losses: list[torch.Tensor] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.twinned(args), self.twinned(kwargs or {})
        if self._recorder.paused:
            return func(*args, **kwargs)
        if func is torch.Tensor.item:
            return self._number(*args)
        if func == _DATA.__set__:
            raise CaptureError("it sets .data of a tensor, which no operator tells of; write it with copy_")
        if func in (_GRAD.__set__, _GRAD.__delete__):
            self._gradients.set(args[0], args[1] if len(args) > 1 else None)
        if func in _BACKWARD:
            self.losses.extend(loss for loss in _flat(args[:1]) if isinstance(loss, torch.Tensor))
        result = func(*args, **kwargs)
        if func == _GRAD.__get__:
            self._gradients.read(args[0], result)
        return result

    def _number(self, tensor: torch.Tensor) -> Any:
        if self.in_optimizer:
            return self._recorder.number(tensor)
        raise CaptureError(
            "it asks for the value of a tensor (item()), which is known only when the step runs; return the tensor"
        )

    def twinned(self, value: Any) -> Any:
        """``value`` with stand-ins for real tensors."""
        if isinstance(value, torch.Tensor):
            return self._twins.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(self.twinned(item) for item in value)
        return {name: self.twinned(item) for name, item in value.items()} if type(value) is dict else value


def _flat(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _flat(item)] if isinstance(value, (list, tuple)) else [value]
