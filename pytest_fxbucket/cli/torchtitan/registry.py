"""What torchtitan has registered under a name: its models, their flavors, and which flavor ranks can run."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pytest_fxbucket.errors import CaptureError, PlanError, UsageError, named
from pytest_fxbucket.words import nearest

if TYPE_CHECKING:
    from torch import nn

VERSION = "0.2.2"
"""The version that the extra installs; other versions have another registry, or none."""
MOST_BYTES = 1 << 30
"""Most bytes of parameters of a flavor that ranks run as it is; for a larger one a smaller flavor is looked for."""
MOST_BYTES_BUILT = 4 << 30
"""Most bytes of parameters of that smaller flavor."""
_INSTALL = "pip install 'pytest-fxbucket[torchtitan]'"


@dataclass(frozen=True)
class ChosenModel:
    """A model of torchtitan, in one flavor or two."""

    name: str
    spec: Any
    flavor: str
    small: str
    """The flavor that ranks run; it may be the same."""

    def built(self, flavor: str) -> nn.Module:
        """The model in that flavor, without memory."""
        return _without_memory(self.spec, flavor)


def stand_in_for_triton_kernels() -> None:
    """torchtitan's experts import Triton, which a torch for CPUs has not, and call it for nothing that a CPU runs."""
    if find_spec("triton") is None:
        kernels = ModuleType("torchtitan.models.moe.kernels")
        kernels.generate_permute_indices = None  # type: ignore[attr-defined]  # a module has what it is given
        sys.modules.setdefault(kernels.__name__, kernels)


def chosen(name: str, flavor: str) -> ChosenModel:
    """The model ``name`` in ``flavor``.

    Raises :class:`UsageError` without torchtitan of the right version, :class:`PlanError` for names that it does not know, and
    :class:`CaptureError` for a model that is fed more than tokens.
    """
    _refuse_other_versions()
    stand_in_for_triton_kernels()
    spec = _spec(name)
    flavors = list(spec.model_args)
    if flavor not in flavors:
        raise PlanError(
            f'--flavor: torchtitan\'s {name} has no "{flavor}"{nearest(flavor, flavors)}; it has {_listed(flavors)}'
        )
    _refuse_other_inputs(name, spec, flavor)
    return ChosenModel(name, spec, flavor, _small(spec, flavor))


def _refuse_other_versions() -> None:
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        raise UsageError(f"--torchtitan needs torchtitan, which is not installed; {_INSTALL}") from None
    if found != VERSION:
        raise UsageError(f"--torchtitan reads the registry of torchtitan {VERSION}, and {found} is installed; {_INSTALL}")


def _spec(name: str) -> Any:
    from torchtitan.experiments import (  # type: ignore[import-not-found]  # an extra
        _supported_experiments,
    )
    from torchtitan.models import _supported_models  # type: ignore[import-not-found]  # an extra
    from torchtitan.protocols.train_spec import (  # type: ignore[import-not-found]  # an extra
        _extra_train_specs,
        get_train_spec,
    )

    known = sorted({*_supported_models, *_supported_experiments, *_extra_train_specs})
    if name not in known:
        raise PlanError(
            f'--torchtitan: torchtitan {VERSION} has no model "{name}"{nearest(name, known)}; it has {_listed(known)}'
        )
    try:
        return get_train_spec(name)
    except Exception as error:  # whatever its module raises where something that it imports is missing
        raise CaptureError(f"--torchtitan {name} cannot be imported: {named(error).rstrip('.')}") from error


def _listed(names: Collection[str]) -> str:
    return ", ".join(names)


def _refuse_other_inputs(name: str, spec: Any, flavor: str) -> None:
    """Raise CaptureError for a model that is fed more than tokens: a batch is tokens and the tokens that come next."""
    arguments = spec.model_args[flavor]
    takes = inspect.signature(spec.model_cls.forward).parameters.values()
    made = ("self", "tokens", "attention_masks")
    required = [one.name for one in takes if one.default is one.empty and one.name not in made]
    if required or "tokens" not in [one.name for one in takes]:
        raise CaptureError(
            f"--torchtitan {name}: {spec.model_cls.__name__} takes {_listed(required)} and not tokens alone; write factory and "
            "batch, and give them to fxbucket init module:factory"
        )
    kind = getattr(arguments, "attn_type", "sdpa")
    if kind != "sdpa":
        plain = [other for other, one in spec.model_args.items() if getattr(one, "attn_type", "sdpa") == "sdpa"]
        instead = f"; flavors of {name} with plain attention are {_listed(plain)}" if plain else ""
        raise CaptureError(f'--flavor {flavor}: its attention is "{kind}", whose masks are made outside of the model{instead}')


def _small(spec: Any, flavor: str) -> str:
    """``flavor`` itself, if it is small enough, or the smallest of those whose parameters have the same names."""
    if _bytes(spec, flavor) <= MOST_BYTES:
        return flavor
    plain = [other for other, one in spec.model_args.items() if getattr(one, "attn_type", "sdpa") == "sdpa"]
    alike = [other for other in plain if _names(spec, other) == _names(spec, flavor)]
    # Never of none: ``flavor`` itself is among them, since one without plain attention was refused before.
    smallest: str = min(alike, key=lambda other: _bytes(spec, other))
    if (size := _bytes(spec, smallest)) > MOST_BYTES_BUILT:
        raise CaptureError(
            f"--flavor {flavor}: no flavor with the same parameters is smaller than {smallest}, of {size >> 30} GiB; write a "
            "factory with fewer layers, and give it to fxbucket init module:factory"
        )
    return smallest


def _names(spec: Any, flavor: str) -> tuple[set[str], ...]:
    """Names of parameters with "*" for layer numbers: each parameter once, and with all names of tied ones."""
    model = _without_memory(spec, flavor)
    named = [list(model.named_parameters(remove_duplicate=once)) for once in (True, False)]
    return tuple({re.sub(r"\d+", "*", name) for name, _ in every} for every in named)


def _bytes(spec: Any, flavor: str) -> int:
    return sum(one.numel() * one.element_size() for one in _without_memory(spec, flavor).parameters())


def _without_memory(spec: Any, flavor: str) -> nn.Module:
    import torch
    from torchtitan.config import JobConfig  # type: ignore[import-not-found]  # an extra

    arguments = deepcopy(spec.model_args[flavor])
    arguments.update_from_config(JobConfig())
    with torch.device("meta"):
        model: nn.Module = spec.model_cls(arguments)
    return model
