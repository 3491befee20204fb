"""Places of parameters in modules (``Module._parameters``), and calls of torch seen from Python; in torch 2.11 to 2.15.

``autograd.Function.apply`` is not among the calls that a ``TorchFunctionMode`` sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.autograd import Function
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from torch import nn

__all__ = ["TorchFunctionMode", "functions_given", "with_parameters"]

_OF_RNNS = ("_flat_weights", "_flat_weight_refs")


@contextmanager
def with_parameters(model: nn.Module, places: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """In the block each module of ``model`` has ``places`` of its parameters instead of them.

    An RNN keeps lists of them, which it makes anew when it finds others in their places.
    """
    before = [(module, module._parameters) for module in model.modules()]
    kept = [(module, {name: vars(module)[name] for name in _OF_RNNS if name in vars(module)}) for module, _ in before]
    try:
        for module, parameters in before:
            module._parameters = places(parameters)
        yield
    finally:
        for module, parameters in before:
            module._parameters = parameters
        for module, lists in kept:
            vars(module).update(lists)


@contextmanager
def functions_given(exchange: Callable[[Any], Any]) -> Iterator[None]:
    """In the block every ``autograd.Function`` of the process is applied to what ``exchange`` makes of its arguments."""
    before = vars(Function)["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        return before.__get__(None, cls)(*exchange(args), **exchange(kwargs))

    Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Function.apply = before  # type: ignore[method-assign]
