"""Parameters that are gathered where a module first reads them: SimpleFSDP's way (arXiv 2411.00284), for any mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from pytest_fxbucket.capture.backward import StageRead, edge, with_gradient
from pytest_fxbucket.capture.names import NodeNamer
from pytest_fxbucket.capture.parallel.modes import ParallelMode
from pytest_fxbucket.capture.parallel.sequence_parallel import summed
from pytest_fxbucket.compat import pytree
from pytest_fxbucket.compat.modules import TorchFunctionMode, functions_given, with_parameters
from pytest_fxbucket.compat.tracing import is_tracing
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.step.mesh import Group

Hook = Callable[[torch.Tensor], "torch.Tensor | None"]
"""What ``Tensor.register_hook`` takes."""


@dataclass(frozen=True, slots=True)
class ParameterTravel:
    """How one parameter travels."""

    mode: ParallelMode
    shape: torch.Size
    """Shape of what the mode gathers."""
    param_dtype: torch.dtype | None
    """dtype that it is gathered in; None: its own. A complex parameter is always gathered in its own."""
    reduce_dtype: torch.dtype | None
    """dtype that its gradient is reduced in; None: the gradient's own."""
    fqn: str = "a parameter"
    mode_name: str = ""
    """Name of the mode in the plan, for errors."""
    summed_over: Group | None = None
    """Ranks over which the gradient is summed before the mode reduces it, as over tp for a norm that reads parts of the
    sequence; None: each rank has the whole gradient."""

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """The whole parameter. Raises :class:`CaptureError` for a mode that gives another shape."""
        whole = self.mode.gather(_cast(part, self.param_dtype), self.shape)
        is_longer = isinstance(whole, torch.Tensor) and whole.numel() > self.shape.numel()
        use = "cut off what part() added" if is_longer else "give the whole of what part() parts, alike on every rank"
        self._refuse_other_shape("gather", whole, self.shape, f"for {self.fqn}, whose shape", use)
        return whole

    def reduce(self, gradient: torch.Tensor, part: torch.Size) -> torch.Tensor:
        """Rank's part of ``gradient``, as :meth:`to_reduce` gives it, of the shape ``part``.

        Raises :class:`CaptureError` for a mode that gives another.
        """
        reduced = self.mode.reduce(gradient)
        of = f"for the gradient of {self.fqn}, of which part()'s shape"
        self._refuse_other_shape("reduce", reduced, part, of, "give the part that part() gives")
        return reduced

    def _refuse_other_shape(self, method: str, given: object, shape: torch.Size, of: str, use: str) -> None:
        if isinstance(given, torch.Tensor) and given.shape == shape:
            return
        what = list(given.shape) if isinstance(given, torch.Tensor) else f"a value of type {type(given).__name__}"
        raise CaptureError(f"mode {self.mode_name}: {method} gave {what} {of} is {list(shape)}; {use}")

    def to_reduce(self, gradient: torch.Tensor | None, before: torch.Tensor | None = None) -> torch.Tensor:
        """What the mode reduces: ``gradient``, with ``before``, the sum of earlier ones.

        It is summed over tp before it is cast, as FSDP2 takes the gradients of DTensors.
        """
        if before is None:
            assert gradient is not None
            return _cast(self._over_tp(gradient), self.reduce_dtype)
        return self._over_tp(before if gradient is None else self.unreduced(gradient, before))

    def _over_tp(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.summed_over is None else summed(gradient, self.summed_over)

    def unreduced(self, gradient: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        """``gradient`` plus ``before``, the sum of earlier ones, in ``reduce_dtype``; cast once, as FSDP2 does it."""
        return _cast(gradient if before is None else before + gradient, self.reduce_dtype)


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """``tensor`` in ``dtype``. A complex tensor stays as it is, since a real dtype would drop its imaginary part."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _unsharded(part: torch.Tensor, travel: ParameterTravel, before: Callable[[], torch.Tensor | None]) -> torch.Tensor:
    """From a part to the whole parameter; in backward from the whole gradient to the averaged part."""
    shape, dtype = part.shape, part.dtype

    def back(gradient: torch.Tensor) -> torch.Tensor:
        # Asked for only now: a ``backward()`` within forward may have added to it since the gather.
        return travel.reduce(travel.to_reduce(gradient, before()), shape).to(dtype)

    return with_gradient(part, travel.gather, back)


class Reader:
    """Gives whole parameters to the modules of one microbatch, each gathered at its first read, by each stage for itself.

    ``hooks`` are the user's, by FQN: each gets the gradient of the microbatch before it is reduced, as under DDP.

    ``before`` holds sums of earlier microbatches' gradients, which are reduced with this one's. If ``last`` is False nothing is
    reduced, and gradients are to be asked for the tensors of :attr:`whole`; else for those of :attr:`parts`.
    """

    def __init__(
        self,
        parts: Mapping[str, torch.Tensor],
        travels: Mapping[str, ParameterTravel],
        namer: NodeNamer,
        before: Mapping[StageRead, torch.Tensor],
        last: bool,
        hooks: Mapping[str, Sequence[Hook]],
        staged: bool = False,
    ) -> None:
        """``staged``: whether several stages read."""
        self._parts, self._travels, self._namer, self._before, self._last = parts, travels, namer, before, last
        self._hooks, self._staged = hooks, staged
        self.whole: dict[StageRead, torch.Tensor] = {}
        self.parts: dict[StageRead, torch.Tensor] = {}
        """The parts that were gathered in the last microbatch."""
        self._edges: dict[StageRead, torch.Tensor] | None = None

    def read(self, fqn: str) -> torch.Tensor:
        """The whole parameter ``fqn``."""
        read = StageRead(fqn, self._namer.stage)
        if read not in self.whole:
            # The first read may be one without gradients. The gathered tensor is kept for later reads, which may need them.
            with self._namer.inside(fqn.rpartition(".")[0]), torch.inference_mode(False), torch.enable_grad():
                self.whole[read] = self._gathered(read)
                if self.whole[read].requires_grad:
                    for hook in self._hooks.get(fqn, ()):
                        self.whole[read].register_hook(hook)
        if self._edges is None:
            return self.whole[read]
        if read not in self._edges:
            with torch.inference_mode(False), torch.enable_grad():
                self._edges[read] = edge(self.whole[read])
        return self._edges[read]

    @contextmanager
    def summed_separately(self) -> Iterator[None]:
        """Inside, gradients of a parameter's reads are summed by themselves before those of reads elsewhere are added."""
        before, self._edges = self._edges, {}
        try:
            yield
        finally:
            self._edges = before

    def _gathered(self, read: StageRead) -> torch.Tensor:
        part, travel = self._parts[read.fqn], self._travels[read.fqn]
        if self._last:
            # If several stages read it, each has a leaf of its own: gradients are added later, last stage first.
            self.parts[read] = part = part.detach().requires_grad_(part.requires_grad) if self._staged else part
            return _unsharded(part, travel, partial(self._before.get, read))
        with torch.no_grad():
            whole = travel.gather(part.detach())
        return whole.requires_grad_(part.requires_grad)


def hooks_of(model: nn.Module) -> dict[str, list[Hook]]:
    """Hooks on the gradients of parameters, by FQN. Raises :class:`CaptureError` for those that no graph can run."""
    found: dict[str, list[Hook]] = {}
    for fqn, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"parameter {fqn} has a hook of register_post_accumulate_grad_hook, which runs on .grad behind backward and so "
                'not in a graph; leave it out of the factory, and let [optimizer] with [overlap] updates = "ready" update '
                "early"
            )
        if parameter._backward_hooks:
            found[fqn] = list(parameter._backward_hooks.values())
    return found


# Whole parameters wherever a model reads its own: by attribute, ``parameters()``, ``functional_call``, a list that it keeps.
#
# A read of a module's attribute gives the gathered parameter, as under FSDP2. Where code holds the parameter itself (the flat
# weights of an LSTM, a list, a closure), it is exchanged among the arguments of torch's functions.


Gathered = Callable[[Any], Any]
"""What is to be read instead of a value: the gathered tensor of a parameter, anything else as it is."""


def own_parameters(model: nn.Module) -> dict[int, str]:
    """FQN of each parameter of ``model`` by its identity, and by that of the real parameter that it stands for.

    A tied parameter has one FQN.
    """
    named = dict(model.named_parameters())
    reals = {id(parameter.stands_for): fqn for fqn, parameter in named.items() if hasattr(parameter, "stands_for")}
    return {id(parameter): fqn for fqn, parameter in named.items()} | reals


@contextmanager
def read_by(
    model: nn.Module, own: Mapping[int, str], read: Callable[[str], torch.Tensor], is_read: Callable[[], bool] = is_tracing
) -> Iterator[None]:
    """While inside, a read of a parameter of ``model`` gives what ``read`` gives for its FQN.

    ``is_read`` is asked at each read whether it is to be so: by default in what is traced. ``own`` is of
    :func:`own_parameters`.
    """

    def gathered(value: Any) -> Any:
        fqn = own.get(id(value))
        return read(fqn) if fqn is not None and is_read() else value

    # A function mode does not see ``autograd.Function.apply``, which is given exchanged arguments by itself.
    exchanged = _Exchanged(gathered)
    with with_parameters(model, lambda parameters: _Places(parameters, gathered)), functions_given(exchanged.of), exchanged:
        yield


class _Places(dict[str, Any]):
    """A module's parameters by name: a read gives the gathered one. A value that somebody else puts there is given as it is."""

    def __init__(self, held: Mapping[str, Any], gathered: Gathered) -> None:
        super().__init__(held)
        self._gathered = gathered

    # The other methods of a dict do not go through this one, so each that gives values is written out.
    def __getitem__(self, name: str) -> Any:
        return self._gathered(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self._gathered(super().get(name, default))

    def pop(self, name: str, *default: Any) -> Any:
        return self._gathered(super().pop(name, *default))

    def items(self) -> Any:
        return ((name, self[name]) for name in self)

    def values(self) -> Any:
        return (self[name] for name in self)


class _Exchanged(TorchFunctionMode):
    """Exchanges parameters among the arguments of whatever torch is called with."""

    def __init__(self, gathered: Gathered) -> None:
        super().__init__()
        self._gathered = gathered

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self.of(args), **self.of(kwargs or {}))

    def of(self, value: Any) -> Any:
        """``value`` with gathered tensors for parameters in it."""
        return pytree.map_tensors(self._gathered, value)
