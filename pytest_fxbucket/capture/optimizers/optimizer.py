"""From an ``[optimizer]`` table to real optimizers: which parameters each has, and in which groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.optim import Optimizer

from pytest_fxbucket.capture.given_graphs import modules_of
from pytest_fxbucket.capture.optimizers.learning_rates import scheduled_rates, without_memory
from pytest_fxbucket.capture.optimizers.state import first_step_differs, make_state, rates, state_tensors
from pytest_fxbucket.errors import PlanError, named
from pytest_fxbucket.plan import schema_model
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.plan.pass_consistency import entries_of
from pytest_fxbucket.plan.schema import Plan
from pytest_fxbucket.plan.selectors import Entry, ResolvedEntry, parameters_of
from pytest_fxbucket.step.roles import Parameter, names_of_parameters
from pytest_fxbucket.words import nearest

_UNSUPPORTED = {
    "LBFGS": "runs the step's closure again and again; take an optimizer that steps once on given gradients, such as AdamW",
    "SparseAdam": "takes sparse gradients, and reductions give dense ones; take Adam",
}


def build_optimizers(
    specs: Sequence[schema_model.Optimizer],
    parameters: Mapping[str, torch.Tensor],
    entries: Sequence[ResolvedEntry] = (),
    names: Optimizing | None = None,
) -> list[Optimizer]:
    """Make the optimizers of ``specs``, in their order, over ``parameters``: all trainable ones, by FQN, in registration order.

    Parameters may be fake or real shards; ``names`` has the model's names. Raises :class:`PlanError` for a
    selector that matches nothing, a parameter that two optimizers or groups have or none has, a factory that raises or gives no
    optimizer, and one that cannot run in a graph.
    """
    wheres = ["[optimizer]"] if len(specs) == 1 else [f"[[optimizer]] {number}" for number in range(1, len(specs) + 1)]
    owned = _handed_out(
        [spec.params or None for spec in specs],
        wheres,
        list(parameters),
        names,
        open_twice=", so each would have all that no other has; name them",
        left_out="no [[optimizer]] has the trainable parameter {}; add it to params, or leave one's params out",
    )
    return [
        _build(spec, where, _grouped(spec, where, fqns, entries, names), parameters)
        for spec, where, fqns in zip(specs, wheres, owned, strict=True)
    ]


def _handed_out(
    params: Sequence[Sequence[Entry] | None],
    wheres: Sequence[str],
    fqns: Sequence[str],
    names: Optimizing | None,
    *,
    open_twice: str,
    left_out: str,
) -> list[list[str]]:
    """The parameters among ``fqns`` that each of ``wheres`` gets: what its ``params`` select, or without any what is left."""
    open_ones = [where for selectors, where in zip(params, wheres, strict=True) if selectors is None]
    if len(open_ones) > 1:
        raise PlanError(f"{open_ones[0]} and {open_ones[1]} both name no params{open_twice}")
    claims = [
        None if selectors is None else _selected(selectors, fqns, f"{where} params", names)
        for selectors, where in zip(params, wheres, strict=True)
    ]
    owners: dict[str, str] = {}
    for claim, where in zip(claims, wheres, strict=True):
        for fqn in claim or ():
            if fqn in owners:
                raise PlanError(f"{owners[fqn]} and {where} both have the parameter {fqn}; let one of them have it")
            owners[fqn] = where
    rest = [fqn for fqn in fqns if fqn not in owners]
    if rest and not open_ones:
        raise PlanError(left_out.format(rest[0]))
    if open_ones and not rest:
        raise PlanError(f"{open_ones[0]} has no parameter left; the others have them all, so take it out")
    return [rest if claim is None else claim for claim in claims]


def _selected(entries: Sequence[Entry], fqns: Sequence[str], where: str, names: Optimizing | None) -> list[str]:
    """The parameters that selectors name, in registration order."""
    modules = names.modules if names else modules_of(fqns)
    own = set(fqns)
    known = {name: fqn for name, fqn in names.names.items() if fqn in own} if names else {fqn: fqn for fqn in fqns}
    wanted = parameters_of(entries, known, modules, where, "trainable parameters")
    return [fqn for fqn in fqns if fqn in wanted]


def _grouped(
    spec: schema_model.Optimizer, where: str, fqns: Sequence[str], entries: Sequence[ResolvedEntry], names: Optimizing | None
) -> list[tuple[list[str], dict[str, Any]]]:
    """Parameters and options of each group of one optimizer."""
    if spec.groups == "one":
        return [(list(fqns), {})]
    if spec.groups == "entry":
        own = [set(entry.parameters) for entry in entries]
        groups = [[fqn for fqn in fqns if fqn in parameters] for parameters in own]
        rest = set(fqns).difference(*groups)
        return [(group, {}) for group in (*groups, [fqn for fqn in fqns if fqn in rest]) if group]
    if isinstance(spec.groups, str):
        raise PlanError(f'{where} groups is "{spec.groups}", expected "one", "entry" or a list of tables')
    listed = _handed_out(
        [cast("tuple[Entry, ...] | None", table.get("params")) for table in spec.groups],
        [f"{where} groups {number}" for number in range(1, len(spec.groups) + 1)],
        fqns,
        names,
        open_twice="; one may, and has what no other group has",
        left_out=f"{where} groups leave out the parameter {{}}; add it to one, "
        "or add a group without params, `{{}}`, which has the rest",
    )
    options = [{key: value for key, value in table.items() if key != "params"} for table in spec.groups]
    return list(zip(listed, options, strict=True))


def _build(
    spec: schema_model.Optimizer,
    where: str,
    groups: Sequence[tuple[list[str], dict[str, Any]]],
    parameters: Mapping[str, torch.Tensor],
) -> Optimizer:
    factory = import_callable(spec.factory, f"{where} factory")
    given = [{"params": [parameters[fqn] for fqn in fqns], **options} for fqns, options in groups]
    kind = getattr(factory, "__name__", "")
    if kind in _UNSUPPORTED and getattr(factory, "__module__", "").startswith("torch.optim"):
        raise PlanError(f"{where} factory {spec.factory} {_UNSUPPORTED[kind]}")
    try:
        made = factory(given, **spec.args)
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # it may end its process, or skip a test
        raise PlanError(f"{where} factory {spec.factory} raised {named(error)}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise PlanError(f"{where} factory {spec.factory} gave a value of type {type(made).__name__}, expected an Optimizer")
    _refuse_other_options(where, [options for _, options in groups], made)
    if flag := next((key for key in ("capturable", "differentiable") for group in made.param_groups if group.get(key)), None):
        raise PlanError(f"{where} sets {flag}, but a step is traced and compared without it; leave it out")
    if any(map(first_step_differs, made.param_groups)):
        raise PlanError(
            f"{where} sets dampening, with which SGD takes its first gradient whole and no later one, so that no graph does "
            "for all steps; leave it out"
        )
    return made


def _refuse_other_options(where: str, groups: Sequence[Mapping[str, Any]], made: Optimizer) -> None:
    """torch takes any option of a group, and never reads one that it does not know."""
    known = [*made.defaults, "params"]
    for number, options in enumerate(groups, 1):
        if foreign := next((key for key in options if key not in known), None):
            near = nearest(foreign, known) or f"; known are {', '.join(made.defaults)}"
            raise PlanError(f'{where} groups {number} has no option "{foreign}"{near}')


# The optimizers of a plan, over one rank's parts of a model's parameters: fake ones in capture, real ones in the ranks.


@dataclass(frozen=True, slots=True)
class Optimizing:
    """What makes the optimizers; plain data that goes to the ranks."""

    specs: tuple[schema_model.Optimizer, ...]
    trainable: tuple[str, ...]
    """FQNs in registration order."""
    entries: tuple[ResolvedEntry, ...]
    """Of the bucket plan."""
    modules: tuple[str, ...]
    names: Mapping[str, str]
    """Every name of every parameter to its canonical one."""

    def build(self, parts: Mapping[str, torch.Tensor]) -> list[Optimizer]:
        """The optimizers over ``parts``, all parameters by FQN. Raises PlanError as build_optimizers does."""
        return build_optimizers(self.specs, {fqn: parts[fqn] for fqn in self.trainable}, self.entries, self)

    def rates_after(self, taken: int, parameters: Sequence[Parameter]) -> dict[str, float]:
        """Learning rates behind ``taken`` steps of the groups that have a schedule, by name.

        Raises :class:`PlanError` as :func:`scheduled_rates` does.
        """
        if not any(spec.schedule for spec in self.specs):
            return {}
        optimizers = self.build({one.fqn: without_memory(one.shard_shape, one.dtype) for one in parameters})
        return scheduled_rates(self.specs, optimizers, taken)

    def state(self, parts: Mapping[str, torch.Tensor], with_gradient: set[str]) -> dict[tuple[str, str], torch.Tensor]:
        """State before the first step, and the learning rates, by role and name as graphs' inputs have them."""
        optimizers = self.build(parts)
        make_state(optimizers, [part for fqn, part in parts.items() if fqn in with_gradient])
        found = {("state", one.fqn): one.tensor for one in state_tensors(optimizers, parts)}
        return found | {("hyper", fqn): torch.tensor(rate, dtype=torch.float64) for fqn, rate in rates(optimizers).items()}


def optimizing_of(plan: Plan, parameters: Sequence[Parameter], modules: Sequence[str]) -> Optimizing:
    """What makes the optimizers of ``plan``. Raises PlanError for entries that cannot be resolved."""
    names = names_of_parameters(parameters)
    entries = entries_of(plan, names, modules).entries
    trainable = tuple(parameter.fqn for parameter in parameters if parameter.trainable)
    found = Optimizing(plan.optimizer, trainable, entries, tuple(modules), names)
    found.rates_after(plan.run.steps, parameters)  # raises what it would raise on ranks
    return found
