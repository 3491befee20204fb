"""Gradients of embeddings, dense while a step is traced: a sparse one can neither be scattered nor bucketed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pytest_fxbucket.compat.parameters import TorchFunctionMode

_LOOK_UPS = (torch.nn.functional.embedding, torch.nn.functional.embedding_bag)


class DenseGradients(TorchFunctionMode):
    """While entered, look-ups with ``sparse=True`` give the same gradient, dense; :attr:`modules` are those that asked.

    ``module`` gives the FQN of the module that runs.
    """

    def __init__(self, module: Callable[[], str]) -> None:
        super().__init__()
        self.modules: dict[str, None] = {}
        self._module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOK_UPS and kwargs.get("sparse"):
            kwargs = {**kwargs, "sparse": False}
            self.modules[self._module()] = None
        return func(*args, **kwargs)
