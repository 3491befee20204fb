"""Modules whose forward is exchanged while a step is traced: parted over tp or ep, or computed again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from pytest_fxbucket.capture.model import forward_instead
from pytest_fxbucket.capture.names import NodeNamer, first_names, names_of, single_selectors, units_of
from pytest_fxbucket.capture.parallel.experts import ExpertReads, count_of_experts, experts_forward
from pytest_fxbucket.capture.parallel.sequence_parallel import SequenceModules
from pytest_fxbucket.capture.parallel.tensor_parallel import parted_forward, refuse_unpartable
from pytest_fxbucket.capture.reshard import Resharding, resharding_of
from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.entries import Entry, parse_entries
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.selectors import resolve
from pytest_fxbucket.plan.table_rules import SEQUENCE_STYLES
from pytest_fxbucket.step.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Forwards:
    """Modules of one model by what is done to their forward."""

    parted: Mapping[str, str]
    """Linears parted over tp, and whether ``colwise`` or ``rowwise``."""
    sequences: SequenceModules
    """Modules between which activations are parted along the sequence over tp."""
    experts: Mapping[str, int]
    """Modules of experts parted over ep, and how many experts each has in all."""
    recomputed: Sequence[str]
    units: Sequence[str] = ()
    """Modules that entries name, whose inputs are cast to param_dtype."""
    resharding: Resharding = field(default_factory=lambda: Resharding(True))
    cp_form: str = ""
    """How attention sees the whole of a sequence that is parted over cp (``cp_form``); empty: no sequence is parted."""

    @property
    def index_dimensions(self) -> tuple[str, ...]:
        """Mesh dimensions along which a rank's index is an input of the step."""
        return (*(("cp",) if self.cp_form else ()), *(("tp",) if self.sequences.styles else ()))

    def expert_parameters(self, model: nn.Module) -> dict[str, str]:
        """The module in :attr:`experts` of each of their parameters, by the parameter's first FQN."""
        fqn_of = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
        return {fqn_of[id(one)]: module for module in self.experts for one in model.get_submodule(module).parameters()}


def forwards_of(model: nn.Module, plan: Plan) -> Forwards:
    """What ``plan`` asks for. Raises PlanError for selectors that name no module, CaptureError for modules that cannot be."""
    parallel, where = plan.parallel, str(plan.path)
    styles: dict[str, str] = {}
    for selector, style in parallel.tp_plan.items():
        inside = f"{where}: [parallel] tp_plan"
        named = modules_called if style in SEQUENCE_STYLES else modules_named  # dropout has no parameters
        for fqn in named(parse_entries([selector], inside), model, inside):
            if styles.setdefault(fqn, style) != style:
                raise PlanError(
                    f"{inside}: {fqn} is {styles[fqn]} and {style} by two of its selectors; let one of them name it"
                )
    sequences = {fqn: styles.pop(fqn) for fqn in list(styles) if styles[fqn] in SEQUENCE_STYLES}
    experts = modules_named(parallel.ep_plan, model, f"{where}: [parallel] ep_plan")
    refuse_unpartable(model, styles)
    return Forwards(
        styles,
        SequenceModules(sequences, styles),
        {fqn: count_of_experts(fqn, model.get_submodule(fqn)) for fqn in experts},
        modules_called(plan.step.checkpoint, model, f"{where}: [step] checkpoint"),
        units_of(model, plan.bucket.plan) if parallel.param_dtype else (),
        resharding_of(model, plan),
        parallel.cp_form if parallel.cp > 1 else "",
    )


def modules_named(entries: Sequence[Entry], model: nn.Module, where: str) -> list[str]:
    """First FQN of each module that ``entries`` name, ``*`` written out. Raises PlanError, beginning with ``where``."""
    modules = first_names(model)
    # Without aliases: a module of two names, or of tied parameters, is not held by two.
    resolved = resolve(single_selectors(entries), list(names_of(model)), list(modules), unplanned="allow", where=where)
    found = [entry.name for entry in resolved.entries]
    if foreign := next((name for name in found if name not in modules), None):
        raise PlanError(
            f'{where}: "{foreign}" is a parameter, where a module is expected; name {foreign.rpartition(".")[0] or "one"}'
        )
    return list(dict.fromkeys(modules[name] for name in found))


def modules_called(entries: Sequence[Entry], model: nn.Module, where: str) -> list[str]:
    """FQN of each module that ``entries`` name, with parameters or without. Raises PlanError, beginning with ``where``."""
    modules = [fqn for fqn, _ in model.named_modules()]
    # Selectors are resolved among parameters. Each module is given one of its own here, so that modules without any are found.
    calls = [f"{fqn}.forward" for fqn in modules if fqn]
    found = resolve(single_selectors(entries), calls, modules, unplanned="allow", where=where, what="modules")
    return [entry.name.removesuffix(".forward") for entry in found.entries]


@contextmanager
def other_forwards(
    model: nn.Module,
    forwards: Forwards,
    mesh: Mesh,
    namer: NodeNamer,
    places: Mapping[str, torch.Tensor],
    reads: ExpertReads,
) -> Iterator[None]:
    """While inside, modules of ``model`` compute as ``forwards`` says; ``places`` are this rank's indices along dimensions."""
    with ExitStack() as inside:

        def change(fqn: str, forward: Callable[..., Any]) -> None:
            inside.enter_context(forward_instead(model.get_submodule(fqn), forward))

        for fqn, style in forwards.parted.items():
            on_parts = forwards.sequences.is_in_region(fqn)
            linear = cast(nn.Linear, model.get_submodule(fqn))  # or of its forward: others were refused
            change(fqn, parted_forward(fqn, linear, style, mesh.group("tp"), on_parts))
        for fqn, forward in forwards.sequences.forwards(model, mesh.group("tp"), places.get("tp")).items():
            change(fqn, forward)
        for fqn, count in forwards.experts.items():
            change(fqn, experts_forward(fqn, model.get_submodule(fqn), count, mesh.group("ep"), reads))
        for fqn in forwards.recomputed:
            change(fqn, _recomputed(model.get_submodule(fqn).forward, fqn, namer))
        yield


def _recomputed(forward: Callable[..., Any], fqn: str, namer: NodeNamer) -> Callable[..., Any]:
    """``forward``, whose results are not kept but computed again when backward needs them."""
    from torch.utils.checkpoint import checkpoint

    # In backward torch calls this function alone, not the module, so no hook tells the namer which module runs.
    def named(*args: Any, **kwargs: Any) -> Any:
        with namer.inside(fqn):
            return forward(*args, **kwargs)

    return lambda *args, **kwargs: checkpoint(named, *args, use_reentrant=False, **kwargs)
