"""Puts anchors in the places of overridden modules while a step is traced, in forward and in backward."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from pytest_fxbucket.capture.override import ops
from pytest_fxbucket.capture.override.asked import Overridden, Overrides
from pytest_fxbucket.capture.override.call import Call
from pytest_fxbucket.capture.override.live import fqn_of, names_of
from pytest_fxbucket.capture.override.looking import Looking
from pytest_fxbucket.capture.override.structure import rebuilt, written
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.errors import CaptureError


class Anchors:
    """Anchors of one trace.

    ``param_dtype`` is what modules read parameters in, None: their own. ``unused`` says what a call of the real module does
    where a gradient that is asked for is not there: ``zeros``, or it is ``refused``.
    """

    def __init__(
        self, overrides: Overrides, fake_mode: FakeTensorMode, param_dtype: torch.dtype | None = None, unused: str = "zeros"
    ) -> None:
        self.overrides, self.fake_mode = overrides, fake_mode
        self.by_key = {one.key: one for one in overrides.of.values()}
        self.states: Mapping[str, torch.Tensor] = {}
        """What state is while the step is traced, by FQN: inputs of the graph."""
        self._looking = Looking(fake_mode, param_dtype, unused)
        self._known: dict[object, Call] = {}
        self._called: set[str] = set()
        self._numbers = count()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While inside, calling an overridden module leaves an anchor; then modules are as before, on error too."""
        changed: list[tuple[dict[str, Any], Any]] = []
        try:
            for one in self.overrides.of.values():
                own = one.module.__dict__
                changed.append((own, own.get("forward")))
                own["forward"] = self._forward_of(one)
            yield
        finally:
            for own, before in changed:
                if before is None:
                    del own["forward"]
                else:
                    own["forward"] = before

    def refuse_uncalled(self) -> None:
        """Raise :class:`CaptureError` for a module that the step never called."""
        for fqn, one in self.overrides.of.items():
            if fqn not in self._called:
                raise CaptureError(
                    f"{one.where}: {fqn} is overridden, but the step never calls it; what is overridden is a call of the "
                    "module "
                    "itself, not of a method of it, or of a module in it"
                )

    def _forward_of(self, one: Overridden) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._forward(one, args, kwargs)

    def _forward(self, one: Overridden, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._called.add(one.fqn)
        _refuse_autocast(one.fqn)
        tensors: list[torch.Tensor] = []
        given = written((args, kwargs), tensors, f"module {one.fqn} is given")
        if one.subgraph is None:
            self._held(one, names_of(one.module))  # gathered before anybody looks at them untraced
        call = self._call(one, given, tensors)
        held = self._held(one, call.held)
        asks = set(call.asks)
        flat = [t if i in asks or not t.requires_grad else t.detach() for i, t in enumerate([*held, *tensors])]
        results = _Anchor.apply(one.key, call.text(), next(self._numbers), len(held), *flat)  # type: ignore[no-untyped-call]
        return rebuilt(call.gives, results)

    def _call(self, one: Overridden, given: Any, tensors: Sequence[torch.Tensor]) -> Call:
        """Looked at once for each kind of arguments."""
        kinds = tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors)
        key = one.fqn, json.dumps(given), kinds, torch.is_grad_enabled()
        if key not in self._known:
            self._known[key] = self._looking.at(one, given, tensors)
        return self._known[key]

    def _held(self, one: Overridden, names: Sequence[str]) -> list[torch.Tensor]:
        """Parameters and buffers as the module reads them, and state."""
        return [self._read(one, name) for name in names]

    def _read(self, one: Overridden, name: str) -> torch.Tensor:
        if one.subgraph is not None and name in one.subgraph.state:
            return self.states[f"{one.fqn}.{name}"]
        path, _, leaf = name.rpartition(".")
        tensor: torch.Tensor = getattr(one.module.get_submodule(path), leaf)
        return tensor


def _refuse_autocast(fqn: str) -> None:
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise CaptureError(
            f"module {fqn} is overridden and called under torch.autocast, which would not be on where the graph runs; let the "
            "module enter autocast itself, or cast its inputs"
        )


class _Anchor(torch.autograd.Function):
    """A call of an overridden module, as two operators that only stand for it."""

    @staticmethod
    def forward(ctx: Any, key: str, text: str, number: int, held: int, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = key, text, number, held
        ctx.save_for_backward(*flat)
        ctx.set_materialize_grads(False)
        results = ops.ANCHOR_FORWARD(key, text, list(flat[:held]), list(flat[held:]), number)
        ctx.mark_non_differentiable(*(result for result in results if not result.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        key, text, number, held = ctx.call
        of = [i for i, grad in enumerate(grads) if grad is not None]
        needs = ctx.needs_input_grad[4:]
        wanted = [i for i, need in enumerate(needs) if need]
        if not of or not wanted:
            return (None,) * (4 + len(needs))
        flat = _saved(ctx, key)
        given = [grad for grad in grads if grad is not None]
        made = _AnchorBackward.apply(key, text, number, held, of, wanted, *flat, *given)  # type: ignore[no-untyped-call]
        found = iter(made)
        return (None,) * 4 + tuple(next(found) if need else None for need in needs)


class _AnchorBackward(torch.autograd.Function):
    """Makes a gradient that goes on through a backward an error; by itself it would stop there."""

    @staticmethod
    def forward(
        ctx: Any, key: str, text: str, number: int, held: int, of: list[int], wanted: list[int], *flat: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.key = key
        tensors, grads = list(flat[: -len(of)]), list(flat[-len(of) :])
        return tuple(ops.ANCHOR_BACKWARD(key, text, tensors[:held], tensors[held:], grads, of, wanted, number))

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise CaptureError(
            f"a gradient of a gradient goes through module {fqn_of(ctx.key)}, which is overridden and has first ones only; "
            "leave it traced, or keep the penalty (create_graph = True) from it"
        )


def _saved(ctx: Any, key: str) -> Sequence[torch.Tensor]:
    try:
        saved: Sequence[torch.Tensor] = ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        raise CaptureError(
            f"what module {fqn_of(key)} was given, or reads, is written in place after its call, and its backward "
            "needs it "
            "as it was; write a new tensor instead"
        ) from error
    return saved
