"""Builds a plan's model by its factory, as ordinary code, and exchanges its parameters and forwards while it is traced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pytest_fxbucket.capture.refusals import refuse_lazy
from pytest_fxbucket.compat import tracing
from pytest_fxbucket.compat.fake_tensors import FakeTensorMode, computing_without_values, on_registration
from pytest_fxbucket.errors import CaptureError
from pytest_fxbucket.user_frame import at_user_frame, naming_user_frame

MOST_BYTES = 1 << 30
"""Parameters are real until their bytes exceed it. Each further one loses its memory when a module gets it."""


def build(factory: Callable[..., Any], args: Mapping[str, Any], name: str) -> nn.Module:
    """What ``factory``, called ``name`` in the plan, gives for ``args``; parameters beyond :data:`MOST_BYTES` are fake tensors.

    Initialisers of those do nothing; all else in the factory runs as anywhere. Raises :class:`CaptureError` for what the
    factory raises, for code that reads the value of a parameter without memory, and for what is no module.
    """
    with ExitStack() as inside:
        counter = _ParameterBytes(inside)
        inside.enter_context(on_registration(counter.replacement_of))
        with naming_user_frame(lambda: f"[model] factory {name}"):
            try:
                built = factory(**args)
            except Exception as error:
                if counter.mode is None or tracing.untraceable(error) is None:
                    raise
                raise CaptureError(
                    f"[model] factory {name} reads the value of a parameter{at_user_frame(error)}, but beyond "
                    f"{MOST_BYTES >> 30} GiB parameters are built without values; make it of numbers or buffers, or give the "
                    "plan a smaller model ([model] args)"
                ) from error
    if not isinstance(built, nn.Module):
        raise CaptureError(f"[model] factory {name} gave a value of type {type(built).__name__}, expected a torch.nn.Module")
    refuse_lazy(built.named_parameters())
    return built


class _ParameterBytes:
    """Counts the bytes of parameters as modules get them."""

    def __init__(self, inside: ExitStack) -> None:
        self.mode: FakeTensorMode | None = None
        """Mode of the parameters without memory; None as long as there are none."""
        self._inside, self._bytes = inside, 0
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor | None]] = {}
        """By identity each real parameter that was seen, and the fake one that modules get instead, if they do."""

    def replacement_of(self, module: nn.Module, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """What ``module`` gets where ``parameter`` is put in its place."""
        if tracing.is_fake(parameter) or parameter.is_meta or is_lazy(parameter):
            return parameter
        known = self._known.get(id(parameter))
        # Identities of parameters that are gone are used again. A parameter that several modules share counts once, and has one
        # twin.
        if known is None or known[0]() is not parameter:
            self._bytes += parameter.untyped_storage().nbytes()
            twin = None
            if self._bytes > MOST_BYTES:
                self.mode = self.mode or self._inside.enter_context(computing_without_values())
                twin = fake_twin(self.mode, parameter)
            known = weakref.ref(parameter), twin
            self._known[id(parameter)] = known
        return parameter if known[1] is None else known[1]


# Fake tensors in the places of a module's parameters and buffers, for as long as a step is traced.


def fake_twin(mode: FakeTensorMode, real: torch.Tensor) -> torch.Tensor:
    """A fake tensor like ``real``, on the CPU for one on meta.

    For a parameter it is a parameter, with the same attributes and hooks, and with ``stands_for``, the real one.
    """
    device = torch.device("cpu") if real.is_meta else real.device
    with mode, torch.no_grad():
        fake = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=device)
    if not isinstance(real, torch.nn.Parameter):
        return fake.requires_grad_(real.requires_grad)
    twin = torch.nn.Parameter(fake, requires_grad=real.requires_grad)
    twin.stands_for = real  # type: ignore[attr-defined]  # an attribute of ours
    for name, value in vars(real).items():
        if not hasattr(twin, name):
            setattr(twin, name, value)
    take_hooks(twin, real)
    return twin


def take_hooks(twin: torch.Tensor, real: torch.Tensor) -> None:
    """Give ``twin`` the hooks of the parameter ``real``."""
    for hook in (real._backward_hooks or {}).values():
        twin.register_hook(hook)
    for hook in hooks_behind_gradient(real):
        twin.register_post_accumulate_grad_hook(hook)


def hooks_behind_gradient(real: torch.Tensor) -> list[Callable[[torch.Tensor], None]]:
    """What ``register_post_accumulate_grad_hook`` was given."""
    return list((getattr(real, "_post_accumulate_grad_hooks", None) or {}).values())


def fake_twins(model: nn.Module, mode: FakeTensorMode) -> dict[int, torch.Tensor]:
    """Twins of all parameters and buffers of ``model``, by identity of the real tensor."""
    tensors = [*model.parameters(), *model.buffers()]
    return {id(tensor): fake_twin(mode, tensor) for tensor in tensors}


def refuse_scripted(model: nn.Module) -> None:
    """Raise :class:`CaptureError` for a model that is scripted by torch.jit, or a part of which is."""
    if scripted := [fqn for fqn, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]:
        where = f"module {scripted[0]}" if scripted[0] else "the model"
        raise CaptureError(f"{where} is scripted by torch.jit, and nothing in it can be traced; leave that out")


@contextmanager
def in_modules(model: nn.Module, twins: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """While inside, modules have the ``twins`` (by identity of the real tensor) in place of parameters and buffers.

    Behind it every module has the attributes, parameters, buffers and hooks that it had before, whatever was set inside. Raises
    :class:`CaptureError` for a module that is scripted.
    """
    refuse_scripted(model)
    # Two things are kept: which attributes each module has, and what is in its tables of parameters, buffers and hooks. Forward
    # may exchange an attribute, or write into a table that stays the same object.
    before = [(module, dict(vars(module))) for module in model.modules()]
    places: list[dict[str, Any]] = [held for module, _ in before for held in (module._parameters, module._buffers)]
    hooks = [table for _, own in before for name, table in own.items() if "_hooks" in name and isinstance(table, dict)]
    reals = [dict(held) for held in (*places, *hooks)]
    try:
        for held in places:
            held.update({name: twins[id(tensor)] for name, tensor in held.items() if tensor is not None})
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        for held, real in zip((*places, *hooks), reals, strict=True):
            held.clear()
            held.update(real)


@contextmanager
def forward_instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """While inside, calling ``module`` calls ``forward``; past its ``__setattr__``, which may hand on to a module in it."""
    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before
