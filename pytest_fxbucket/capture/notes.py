"""What is traced otherwise than a model has it, with the same numbers: said in audit's summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytest_fxbucket.compat.compiled import is_compiled
from pytest_fxbucket.plan.hints import some

if TYPE_CHECKING:
    from torch import nn

    from pytest_fxbucket.capture.dense import DenseGradients
    from pytest_fxbucket.capture.roles import Parameter


def notes_of(model: nn.Module, parameters: Sequence[Parameter], dense: DenseGradients, held: Sequence[str]) -> Iterator[str]:
    """A clause for each such thing in ``model``, once it was traced; ``held`` are inputs that no module registers."""
    compiled = [fqn or "the model" for fqn, module in model.named_modules() if is_compiled(module)]
    if compiled:
        yield f"{some(compiled)} run as what torch.compile wraps"
    if dense.modules:
        yield f"{some(list(dense.modules))} with dense gradients in place of sparse ones"
    if scalars := [parameter.fqn for parameter in parameters if parameter.shard_shape and not parameter.shape]:
        yield f"{some(scalars)} without dimension, sharded as one element, where FSDP2 asks for the shape (1,)"
    if held:
        yield f"{some(held)} held in no parameter or buffer, and inputs all the same"
