"""Whole parameters wherever a model reads its own: by attribute, ``parameters()``, ``functional_call``, a list that it keeps.

A module's place of a parameter gives the gathered one, as under FSDP2. Who holds the parameter itself (the flat weights of an
LSTM, a list, a closure) has it exchanged where torch is called with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pytest_fxbucket.compat.parameters import TorchFunctionMode, functions_given, with_parameters
from pytest_fxbucket.compat.trace import is_tracing

if TYPE_CHECKING:
    from torch import nn

Gathered = Callable[[Any], Any]
"""What is to be read instead of a value: the gathered tensor of a parameter, anything else as it is."""


def own_parameters(model: nn.Module) -> dict[int, str]:
    """FQN of each parameter of ``model`` by its identity, and by that of the real one if it stands for one.

    A tied one has one FQN.
    """
    named = dict(model.named_parameters())
    reals = {id(parameter.stands_for): fqn for fqn, parameter in named.items() if hasattr(parameter, "stands_for")}
    return {id(parameter): fqn for fqn, parameter in named.items()} | reals


@contextmanager
def read_by(model: nn.Module, own: Mapping[int, str], read: Callable[[str], torch.Tensor]) -> Iterator[None]:
    """While inside, whoever reads a parameter of ``model`` gets what ``read`` gives for its FQN, asked at each read
    that is traced.

    ``own`` is of :func:`own_parameters`.
    """

    def gathered(value: Any) -> Any:
        fqn = own.get(id(value))
        return read(fqn) if fqn is not None and is_tracing() else value

    exchanged = _Exchanged(gathered)
    with with_parameters(model, lambda parameters: _Places(parameters, gathered)), functions_given(exchanged.of), exchanged:
        yield


class _Places(dict[str, Any]):
    """A module's parameters by name, each the gathered one when it is read; what somebody else puts there is as it is."""

    def __init__(self, held: Mapping[str, Any], gathered: Gathered) -> None:
        super().__init__(held)
        self._gathered = gathered

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
        if isinstance(value, torch.Tensor):
            return self._gathered(value)
        if type(value) in (list, tuple):
            return type(value)(map(self.of, value))
        if type(value) is dict:
            return {key: self.of(item) for key, item in value.items()}
        return value
