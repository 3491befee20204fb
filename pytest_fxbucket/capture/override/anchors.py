"""Anchors: the operators ``anchor_forward`` and ``anchor_backward``, which stand for a call of an overridden module in a trace.

An anchor cannot run; :mod:`pytest_fxbucket.capture.override.expand` turns it into what it stands for. Its arguments are those
of :mod:`pytest_fxbucket.capture.override.calls`, and behind them the ``number`` of the call within the trace.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from operator import attrgetter
from typing import Any

import torch

from pytest_fxbucket.capture.model import forward_instead
from pytest_fxbucket.capture.override.call_text import ModuleCall, call_of, looks, rebuilt, written
from pytest_fxbucket.capture.override.calls import GIVEN, GIVEN_BACK, Tensors, empty_backward, fqn_of, gradients, names_of
from pytest_fxbucket.capture.override.overrides import OverriddenModule, Overrides, Subgraph
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.compat.tracing import looks_at_values, untraced
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.user_frame import naming_user_frame
from pytest_fxbucket.words import nearest


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.key, ctx.text, held, given, ctx.number = inputs
    ctx.held = len(held)
    ctx.save_for_backward(*held, *given)
    # A result that no gradient comes to has None instead of zeros, so that the anchor's backward names those that have one.
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(one for one in output if not (one.is_floating_point() or one.is_complex())))


def _backward(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    needs = [*ctx.needs_input_grad[2], *ctx.needs_input_grad[3]]
    wanted = [i for i, need in enumerate(needs) if need]
    given = {i: grad for i, grad in enumerate(grads) if grad is not None}
    found: dict[int, torch.Tensor] = {}
    if given and wanted:
        try:
            flat = list(ctx.saved_tensors)
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise CaptureError(
                f"what module {fqn_of(ctx.key)} was given, or reads, is written in place after its call, and its backward "
                "needs it as it was; write a new tensor instead"
            ) from error
        held, inputs = flat[: ctx.held], flat[ctx.held :]
        made = ANCHOR_BACKWARD(ctx.key, ctx.text, held, inputs, [*given.values()], [*given], wanted, ctx.number)
        found = dict(zip(wanted, made, strict=True))
    flat_found = [found.get(i) for i in range(len(needs))]
    return None, None, flat_found[: ctx.held], flat_found[ctx.held :], None


def _refuse_second(ctx: Any, *_: Any) -> Any:
    """Raise :class:`CaptureError` for a gradient of a gradient, which would stop at ``anchor_backward`` unseen."""
    raise CaptureError(
        f"a gradient of a gradient goes through module {fqn_of(ctx.key)}, which is overridden and has first ones only; leave "
        "it traced, or keep the penalty (create_graph = True) from it"
    )


def _define(name: str, given: str, empty: Callable[..., Any], keep: Callable[..., None], backward: Callable[..., Any]) -> Any:
    def cannot_run(module: str, *_: Any) -> list[torch.Tensor]:
        raise NotImplementedError(f"the anchor of module {fqn_of(module)} cannot run")

    schema = f"({given}, int number) -> Tensor[]"
    op = torch.library.custom_op(f"fxbucket::{name}", cannot_run, mutates_args=(), schema=schema)
    op.register_fake(empty)
    op.register_autograd(backward, setup_context=keep)
    return getattr(torch.ops.fxbucket, name).default


ANCHOR_FORWARD: torch._ops.OpOverload = _define(
    "anchor_forward", GIVEN, lambda _, call, held, inputs, __: call_of(call).empty_results([*inputs, *held]), _keep, _backward
)
ANCHOR_BACKWARD: torch._ops.OpOverload = _define(
    "anchor_backward", GIVEN_BACK, empty_backward, lambda ctx, inputs, output: setattr(ctx, "key", inputs[0]), _refuse_second
)


class Anchors:
    """Anchors of one trace.

    ``param_dtype`` is the dtype that modules read parameters in; None: their own.
    """

    def __init__(self, overrides: Overrides, fake_mode: FakeTensorMode, param_dtype: torch.dtype | None = None) -> None:
        self.overrides, self.fake_mode = overrides, fake_mode
        self.by_key = {one.key: one for one in overrides.of.values()}
        self.states: Mapping[str, torch.Tensor] = {}
        """What state is while the step is traced, by FQN: inputs of the graph."""
        self._param_dtype = param_dtype
        self._known: dict[object, ModuleCall] = {}
        self._called: set[str] = set()
        self._numbers = count()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While inside, calling an overridden module leaves an anchor; then modules are as before, on error too."""
        with ExitStack() as inside:
            for one in self.overrides.of.values():
                inside.enter_context(forward_instead(one.module, partial(self._forward, one)))
            yield

    def refuse_uncalled(self) -> None:
        """Raise :class:`CaptureError` for a module that the step never called."""
        for fqn, one in self.overrides.of.items():
            if fqn not in self._called:
                raise CaptureError(
                    f"{one.where}: {fqn} is overridden, but the step never calls it; what is overridden is a call of the "
                    "module itself, not of a method of it, or of a module in it"
                )

    def _forward(self, one: OverriddenModule, /, *args: Any, **kwargs: Any) -> Any:
        self._called.add(one.fqn)
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            raise CaptureError(
                f"module {one.fqn} is overridden and called under torch.autocast, which would not be on where the graph runs; "
                "let the module enter autocast itself, or cast its inputs"
            )
        tensors: list[torch.Tensor] = []
        given = written((args, kwargs), tensors, f"module {one.fqn} is given")
        if one.subgraph is None:
            for name in names_of(one.module):  # so the gathers are traced: what :meth:`_call` reads is not
                self._read(one, name)
        call = self._call(one, given, tensors)
        flat = [*(self._read(one, name) for name in call.state_names), *tensors]
        # Without a graph behind it, a tensor that the call gives no gradient is not asked for one.
        flat = [t if i in call.asks or not t.requires_grad else t.detach() for i, t in enumerate(flat)]
        held, inputs = flat[: len(call.state_names)], flat[len(call.state_names) :]
        return rebuilt(call.gives, ANCHOR_FORWARD(one.key, call.text(), held, inputs, next(self._numbers)))

    def _read(self, one: OverriddenModule, name: str) -> torch.Tensor:
        """The parameter or buffer ``name`` as the module reads it, or state of that name."""
        if one.subgraph is not None and name in one.subgraph.state:
            return self.states[f"{one.fqn}.{name}"]
        tensor: torch.Tensor = attrgetter(name)(one.module)
        return tensor

    def _call(self, one: OverriddenModule, given: Any, tensors: Tensors) -> ModuleCall:
        """What a call reads and gives; found once for each kind of arguments, on fake tensors made for that."""
        kinds = tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors)
        key = one.fqn, json.dumps(given), kinds, torch.is_grad_enabled()
        if key not in self._known:
            with untraced(self.fake_mode):
                fakes = [fake_like(t, requires_grad=t.requires_grad and torch.is_grad_enabled()) for t in tensors]
                of = self._call_of_module if one.subgraph is None else partial(self._call_of_subgraph, one.subgraph)
                self._known[key] = of(one, given, fakes)
        return self._known[key]

    def _call_of_module(self, one: OverriddenModule, given: Any, fakes: Tensors) -> ModuleCall:
        names = names_of(one.module)
        trained = {name for name, parameter in one.module.named_parameters() if parameter.requires_grad}
        asks = [i for i, name in enumerate(names) if name in trained and torch.is_grad_enabled()]
        asks += [i for i, fake in enumerate(fakes, len(names)) if fake.requires_grad]
        idle = [i for i, name in enumerate(names) if name in trained and self.overrides.may_be_idle(f"{one.fqn}.{name}")]
        all_idle = len(idle) == len(trained)  # nothing that reads an input needs to run then
        needed = tuple(i for i in asks if not (i in idle if i < len(names) else all_idle))
        results: list[torch.Tensor] = []
        result = self._result_of(one, given, fakes, has_gradients=bool(asks))
        gives = written(result, results, f"{one.where}: output of module {one.fqn} gives")
        return ModuleCall(tuple(names), given, gives, tuple(map(looks, results)), tuple(asks), needed)

    @staticmethod
    def _result_of(one: OverriddenModule, given: Any, fakes: Tensors, *, has_gradients: bool) -> Any:
        """What a call gives, as ``output`` says; without it a tensor like the first that is given."""
        if one.output is not None:
            args, kwargs = rebuilt(given, fakes)
            with naming_user_frame(lambda: f"{one.where}: output of module {one.fqn}"):
                return one.output(one.module, *args, **kwargs)
        if not fakes or (has_gradients and not (fakes[0].is_floating_point() or fakes[0].is_complex())):
            first = f"{fakes[0].dtype} first, which has no gradients as its result has" if fakes else "no tensor"
            raise CaptureError(
                f"{one.where}: module {one.fqn} is given {first}, so that its result cannot be like it; say by output what a "
                "call gives"
            )
        return torch.empty_like(fakes[0], memory_format=_layout(fakes[0]))

    def _call_of_subgraph(self, subgraph: Subgraph, one: OverriddenModule, given: Any, fakes: Tensors) -> ModuleCall:
        held: dict[str, torch.Tensor] = {}
        for name, parameter in one.module.named_parameters():
            trained = parameter.requires_grad and torch.is_grad_enabled()
            held[name] = fake_like(parameter, self._param_dtype, requires_grad=trained)
        for name, tensor in (*one.module.named_buffers(), *subgraph.state.items()):
            held[name] = fake_like(tensor)
        reads = _Reads(one.fqn, held)
        output, _ = run_subgraph(one, subgraph, reads, given, fakes)
        results: list[torch.Tensor] = []
        gives = written(output, results, f"the sub-graph of module {one.fqn} gives")
        # A parameter that the sub-graph does not read is no input of the anchor, so nothing gathers or reduces it.
        names = [name for name in held if name in reads.read or name in subgraph.state]
        inputs = [*(held[name] for name in names), *fakes]
        places = [i for i, tensor in enumerate(inputs) if tensor.requires_grad]
        # Which tensors have a gradient is found by asking for gradients: those that none comes to are not asked for in the
        # trace.
        ones = {i: torch.ones_like(result) for i, result in enumerate(results) if result.requires_grad}
        reached = zip(places, gradients(results, [inputs[i] for i in places], ones), strict=True) if places else ()
        asks = tuple(i for i, grad in reached if grad is not None)
        return ModuleCall(tuple(names), given, gives, tuple(map(looks, results)), asks)


def fake_like(like: torch.Tensor, dtype: torch.dtype | None = None, *, requires_grad: bool = False) -> torch.Tensor:
    """A leaf of the shape and strides of ``like``; called where a fake mode is on."""
    fake = torch.empty_strided(like.shape, like.stride(), dtype=dtype or like.dtype, device=like.device)
    return fake.requires_grad_(requires_grad)


class _Reads(Mapping[str, torch.Tensor]):
    """Tensors by name, and which of them were asked for."""

    def __init__(self, fqn: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self._fqn, self._tensors = fqn, tensors
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise CaptureError(
                f"the sub-graph of module {self._fqn} reads {name!r}, which is neither parameter, buffer nor state of it"
                f"{nearest(str(name), list(self._tensors))}"
            )
        self.read.add(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def run_subgraph(
    one: OverriddenModule, subgraph: Subgraph, tensors: Mapping[str, torch.Tensor], given: Any, inputs: Tensors
) -> tuple[Any, dict[str, torch.Tensor]]:
    """(output, new state by name) of the sub-graph's forward. Raises :class:`CaptureError` for state that does not fit."""
    args, kwargs = rebuilt(given, inputs)
    who = f"the sub-graph {one.by} of module {one.fqn}"
    hint = "it is to read the module's tensors by name from its first argument"
    with naming_user_frame(lambda: who, lambda error: "" if looks_at_values(error) else hint):
        made = subgraph.forward(tensors, *args, **kwargs)
    if not subgraph.state:
        return made, {}
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)):
        raise CaptureError(f"{who} has state, so it is to give (output, dict of new values), and gives a {type(made).__name__}")
    output, new = made
    for wrong in sorted(set(new) ^ set(subgraph.state)):
        what = "no new value of its state" if wrong in subgraph.state else "a new value of what is not its state,"
        raise CaptureError(f"{who} gives {what} {wrong}")
    for name, first in subgraph.state.items():
        value = new[name]
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (first.shape, first.dtype):
            found = looks(value) if isinstance(value, torch.Tensor) else type(value).__name__
            raise CaptureError(f"{who} gives {name} a new value of {found}, and it is {looks(first)}")
    return output, {name: new[name].detach() for name in subgraph.state}


def _layout(given: torch.Tensor) -> torch.memory_format:
    """How results lie in memory where nobody says: like images of channels last, which keep to that; else contiguous."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    kept = given.dim() in formats and given.is_contiguous(memory_format=formats[given.dim()])
    return torch.preserve_format if kept else torch.contiguous_format
