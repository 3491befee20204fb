"""Looks at a call of an overridden module before it is anchored, on fake tensors of their own: what it reads, and gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pytest_fxbucket.capture.blame import blamed
from pytest_fxbucket.capture.override.asked import Overridden, Subgraph
from pytest_fxbucket.capture.override.call import Call
from pytest_fxbucket.capture.override.live import names_of
from pytest_fxbucket.capture.override.promise import promise_text
from pytest_fxbucket.capture.override.structure import rebuilt, written
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode
from pytest_fxbucket.compat.trace import looks_at_values
from pytest_fxbucket.compat.untraced import untraced
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.plan.rules import nearest


class Looking:
    """For one trace; arguments are those of :class:`pytest_fxbucket.capture.override.anchors.Anchors`."""

    def __init__(self, fake_mode: FakeTensorMode, param_dtype: torch.dtype | None, unused: str) -> None:
        self._mode, self._param_dtype, self._unused = fake_mode, param_dtype, unused

    def at(self, one: Overridden, given: Any, tensors: Sequence[torch.Tensor]) -> Call:
        """The call, ``given`` as :func:`written` has it, of ``tensors``. Raises :class:`CaptureError` for what cannot be."""
        with_gradients = torch.is_grad_enabled()
        with untraced(self._mode):
            fakes = [self._fake(t, t.dtype, t.requires_grad and with_gradients) for t in tensors]
            args, kwargs = rebuilt(given, fakes)
            if one.subgraph is None:
                return self._real(one, given, fakes, args, kwargs)
            held = dict(self._held(one, with_gradients))
            return self._subgraph(one, one.subgraph, given, fakes, held)

    def _real(self, one: Overridden, given: Any, fakes: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Call:
        if one.output is not None:
            with blamed(lambda: f"{one.where}: output of module {one.fqn}"):
                result = one.output(one.module, *args, **kwargs)
        elif fakes:
            result = torch.empty_like(fakes[0])
        else:
            raise CaptureError(
                f"{one.where}: module {one.fqn} is given no tensor that its result could be like; say by output what a call "
                "gives"
            )
        results: list[torch.Tensor] = []
        gives = written(result, results, f"{one.where}: output of module {one.fqn} gives")
        names = names_of(one.module)
        trained = {name for name, parameter in one.module.named_parameters() if parameter.requires_grad}
        asks = [i for i, name in enumerate(names) if name in trained and torch.is_grad_enabled()]
        asks += [i for i, fake in enumerate(fakes, len(names)) if fake.requires_grad]
        return Call(tuple(names), given, gives, tuple(map(promise_text, results)), tuple(asks), self._unused)

    def _subgraph(
        self, one: Overridden, subgraph: Subgraph, given: Any, fakes: Sequence[torch.Tensor], held: Mapping[str, torch.Tensor]
    ) -> Call:
        reads = Reads(one.fqn, held)
        output, _ = run_subgraph(one, subgraph, reads, given, fakes)
        results: list[torch.Tensor] = []
        gives = written(output, results, f"the sub-graph of module {one.fqn} gives")
        names = [name for name in held if name in reads.read or name in subgraph.state]
        inputs = [*(held[name] for name in names), *fakes]
        asks = _reached(results, inputs)
        return Call(tuple(names), given, gives, tuple(map(promise_text, results)), tuple(asks))

    def _held(self, one: Overridden, with_gradients: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in one.module.named_parameters():
            dtype = self._param_dtype or parameter.dtype
            yield name, self._fake(parameter, dtype, parameter.requires_grad and with_gradients)
        for name, tensor in (*one.module.named_buffers(), *(one.subgraph.state.items() if one.subgraph else ())):
            yield name, self._fake(tensor, tensor.dtype, False)

    @staticmethod
    def _fake(like: torch.Tensor, dtype: torch.dtype, requires_grad: bool) -> torch.Tensor:
        fake = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=like.device)
        return fake.requires_grad_(requires_grad)


class Reads(Mapping[str, torch.Tensor]):
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
    one: Overridden, subgraph: Subgraph, tensors: Mapping[str, torch.Tensor], given: Any, inputs: Sequence[torch.Tensor]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """(output, new state by name) of the sub-graph's forward. Raises :class:`CaptureError` for state that does not fit."""
    args, kwargs = rebuilt(given, inputs)
    hint = "it is to read the module's tensors by name from its first argument"
    with blamed(lambda: f"the sub-graph {one.by} of module {one.fqn}", lambda error: "" if looks_at_values(error) else hint):
        made = subgraph.forward(tensors, *args, **kwargs)
    if not subgraph.state:
        return made, {}
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)):
        raise CaptureError(
            f"the sub-graph {one.by} of module {one.fqn} has state, so it is to give (output, dict of new values), and gives a "
            f"{type(made).__name__}"
        )
    output, new = made
    if set(new) != set(subgraph.state):
        wrong = sorted(set(new) ^ set(subgraph.state))[0]
        what = "no new value of its state" if wrong in subgraph.state else "a new value of what is not its state,"
        raise CaptureError(f"the sub-graph {one.by} of module {one.fqn} gives {what} {wrong}")
    for name, first in subgraph.state.items():
        value = new[name]
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (first.shape, first.dtype):
            found = promise_text(value) if isinstance(value, torch.Tensor) else type(value).__name__
            raise CaptureError(
                f"the sub-graph {one.by} of module {one.fqn} gives {name} a new value of {found}, and it is "
                f"{promise_text(first)}"
            )
    return output, {name: new[name].detach() for name in subgraph.state}


def _reached(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[int]:
    """Which of ``inputs`` gradients of ``results`` come to."""
    outputs = [result for result in results if result.requires_grad]
    places = [i for i, tensor in enumerate(inputs) if tensor.requires_grad]
    if not outputs or not places:
        return []
    ones = [torch.ones_like(output) for output in outputs]
    found = torch.autograd.grad(outputs, [inputs[i] for i in places], ones, allow_unused=True)
    return [i for i, grad in zip(places, found, strict=True) if grad is not None]
