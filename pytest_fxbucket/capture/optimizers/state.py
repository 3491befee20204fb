"""An optimizer's state by name, and how it is made before the first step: by a step that leaves nothing behind."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.optim import Optimizer

from pytest_fxbucket.capture.functional_operators import written_values
from pytest_fxbucket.compat.dtensors import local_of
from pytest_fxbucket.compat.fake_tensors import TorchDispatchMode, storage_key
from pytest_fxbucket.compat.tracing import is_fake
from pytest_fxbucket.errors import CaptureError

_STILL = {"weight_decay": 0.0, "maximize": False}
"""Options for that step: weight decay would add the parameter, and maximize a sign, to state that copies the gradient."""

_SLOPE = 0.25
"""A gradient like any other, to tell a first step from a later one by."""


def make_state(optimizers: Sequence[Optimizer], with_gradient: Collection[torch.Tensor]) -> None:
    """Let ``optimizers`` make the state of the parameters ``with_gradient``, real or fake; nothing else changes.

    Each takes one step with gradients of negative zero, after which everything that was written gets its value from before the
    first write. Negative zero added to any number is that number, so momentum, which begins as a copy of the first gradient,
    gives the same bits from this state as from none (with dampening it does not, see :func:`first_step_differs`).
    Raises :class:`CaptureError` for real state that a second such step changes, or from which a step differs from the first.
    """
    wanted = {id(tensor) for tensor in with_gradient}
    for optimizer in optimizers:
        first = _first_steps(optimizer, wanted)
        _step_and_undo(optimizer, wanted)
        # State that is written in place has its first value again. A tensor that is put in another's place cannot be undone,
        # which a second step shows.
        made = _values(optimizer)
        if not made:
            continue
        _step_and_undo(optimizer, wanted)
        again = _values(optimizer)
        kept = {at for at, was in made.items() if at in again and _alike(was, again[at])}
        if key := next((at[1] for at in again if at not in kept), ""):
            raise CaptureError(
                f"the optimizer {type(optimizer).__name__} puts another tensor in the place of its state {key!r} in each step, "
                "so what that was before the first step is not known; write it in place, or make it in the constructor"
            )
        _refuse_other_first_step(optimizer, wanted, first)


def _first_steps(optimizer: Optimizer, wanted: Collection[int]) -> dict[torch.Tensor, list[torch.Tensor]]:
    """What a first step makes of the smallest real parameter of each group that has no state yet, and of that state."""
    fresh = [
        [p for p in group["params"] if id(p) in wanted and not is_fake(p) and p not in optimizer.state]
        for group in optimizer.param_groups
    ]
    if not any(fresh) or any(map(first_step_differs, optimizer.param_groups)):
        return {}
    tried = [min(own, key=lambda p: (p.numel() == 0, p.numel())) for own in fresh if own]
    made = _step_and_undo(optimizer, wanted, _SLOPE, tried)
    for parameter in (parameter for own in fresh for parameter in own):
        optimizer.state.pop(parameter, None)
    return made


def _refuse_other_first_step(
    optimizer: Optimizer, wanted: Collection[int], first: Mapping[torch.Tensor, list[torch.Tensor]]
) -> None:
    """Raise :class:`CaptureError` if a step from the state that was made differs from the ``first`` one, taken without any."""
    from_state = _step_and_undo(optimizer, wanted, _SLOPE, list(first)) if first else {}
    for parameter, values in first.items():
        now = from_state[parameter]
        if len(values) != len(now) or not all(map(_alike, values, now)):
            raise CaptureError(
                f"the optimizer {type(optimizer).__name__} takes its first step otherwise than later ones, and one graph does "
                "not do for both; take one step without capture before, or another optimizer"
            )


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both hold the same, a NaN where the other has one."""
    if one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # a NaN alone is not equal to itself


def first_step_differs(group: Mapping[str, Any]) -> bool:
    """Whether a parameter group is that of SGD with dampening, which takes its first gradient whole and no later one.

    No state from before its first step gives the bits of that step: plans and captured steps refuse it.
    """
    return bool(group.get("momentum") and group.get("dampening"))


def _step_and_undo(
    optimizer: Optimizer, wanted: Collection[int], slope: float = -0.0, asked: Sequence[torch.Tensor] = ()
) -> dict[torch.Tensor, list[torch.Tensor]]:
    """Step ``optimizer`` with gradients of ``slope`` for the ``wanted``; what each of ``asked`` and its state was meanwhile."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, slope) if id(parameter) in wanted else None
    groups = [(group, {key: group[key] for key in _STILL if key in group}) for group in optimizer.param_groups]
    numbers = own_numbers(optimizer)
    written = _PutBack()
    try:
        for group, known in groups:
            group.update({key: _STILL[key] for key in known})
        with torch.no_grad(), written, _without_hooks(optimizer):
            optimizer.step()
        return {p: [local_of(one.detach()).clone() for one in (p, *_tensors(optimizer.state[p]))] for p in asked}
    finally:
        with torch.no_grad():
            written.put_back()
        put_back_numbers(optimizer, numbers)
        for group, known in groups:
            group.update(known)
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """While inside, the user's hooks of steps are not run: this step is none of theirs."""
    no_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
    with (
        patch.object(optimizer, "_optimizer_step_pre_hooks", no_hooks),
        patch.object(optimizer, "_optimizer_step_post_hooks", no_hooks),
    ):
        yield


_TORCHS = frozenset(
    {"_need_device_dtype_check_for_fused", "_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured"}
)
"""Attributes that torch's own optimizers and schedulers set in a step, which do not change what it computes."""


def own_numbers(optimizer: Optimizer) -> dict[str, int | float]:
    """The numbers that ``optimizer`` keeps in attributes of its own, as one that counts its steps itself."""
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, (int, float)) and name not in _TORCHS}


def put_back_numbers(optimizer: Optimizer, before: Mapping[str, int | float]) -> None:
    """Have :func:`own_numbers` of ``optimizer`` be what they were."""
    for name in own_numbers(optimizer).keys() - before.keys():
        delattr(optimizer, name)
    vars(optimizer).update(before)


def _tensors(state: Mapping[str, Any]) -> list[torch.Tensor]:
    return [value for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]


def _values(optimizer: Optimizer) -> dict[tuple[int, str], torch.Tensor]:
    """Copies of the state's tensors that have values, by parameter and key."""
    return {
        (number, key): local_of(value).clone()
        for number, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and not is_fake(value)
    }


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of an optimizer's state."""

    fqn: str
    """``<parameter>.<key>``"""
    held_by: dict[str, Any]
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """What is in its place now."""
        found: torch.Tensor = self.held_by[self.key]
        return found


def state_tensors(optimizers: Sequence[Optimizer], parameters: Mapping[str, torch.Tensor]) -> list[StateTensor]:
    """All tensors of the state that ``optimizers`` keep for ``parameters``, by FQN: by optimizer, group, parameter and key."""
    fqns = {id(parameter): fqn for fqn, parameter in parameters.items()}
    return [
        StateTensor(f"{fqns[id(parameter)]}.{key}", optimizer.state[parameter], key)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) in fqns and parameter in optimizer.state
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
    ]


def rates(optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """Learning rate of each group by its name, ``optimizers.<i>.groups.<j>.lr``; 0.0 for a group that has none."""
    return {
        f"optimizers.{i}.groups.{j}.lr": float(group.get("lr", 0.0))
        for i, optimizer in enumerate(optimizers)
        for j, group in enumerate(optimizer.param_groups)
    }


class _PutBack(TorchDispatchMode):
    """Remembers the value of every tensor before it is first written, except for results of ``empty``, which had none."""

    def __init__(self) -> None:
        super().__init__()
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._save(written_values(func, args, kwargs))
        result = func(*args, **kwargs)
        if func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            self._saved[storage_key(result)] = (result, None)
        return result

    def _save(self, written: Any) -> None:
        if isinstance(written, (list, tuple)):
            for tensor in written:
                self._save(tensor)
        elif isinstance(written, torch.Tensor) and not is_fake(written) and storage_key(written) not in self._saved:
            self._saved[storage_key(written)] = (written, written.clone())

    def put_back(self) -> None:
        """Give every tensor that was written its value from before."""
        for tensor, before in self._saved.values():
            if before is not None:
                tensor.copy_(before)
