"""From an ``[optimizer]`` table to real optimizers: which parameters each has, and in which groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from pytest_fxbucket.capture.optimizers.state import first_step_differs, make_state, rates, state_tensors
from pytest_fxbucket.errors import PlanError, named
from pytest_fxbucket.plan.consistency import entries_of
from pytest_fxbucket.plan.factories import import_callable
from pytest_fxbucket.plan.selectors import Entry, ResolvedEntry, resolve
from pytest_fxbucket.words import nearest

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from pytest_fxbucket.plan import schema
    from pytest_fxbucket.step.roles import Parameter

_UNSUPPORTED = {
    "LBFGS": "runs the step's closure again and again; take an optimizer that steps once on given gradients, such as AdamW",
    "SparseAdam": "takes sparse gradients, and reductions give dense ones; take Adam",
}


class Spec(Protocol):
    """What an ``[optimizer]`` table says."""

    @property
    def factory(self) -> str:
        """``module:callable``, called with the parameter groups."""

    @property
    def args(self) -> Mapping[str, Any]:
        """Keyword arguments of the factory."""

    @property
    def params(self) -> tuple[Entry, ...]:
        """Which parameters; none given: all that no other optimizer has."""

    @property
    def groups(self) -> str | tuple[Mapping[str, object], ...]:
        """``one``, ``entry`` (a group for each entry of the plan), or tables of params and options, such as lr."""


class ModelNames(Protocol):
    """What selectors need to know of a model."""

    @property
    def modules(self) -> Sequence[str]:
        """FQN of every module; the root is ''."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other FQNs of tied parameters, to the canonical ones."""


def build_optimizers(
    specs: Sequence[Spec],
    parameters: Mapping[str, torch.Tensor],
    entries: Sequence[ResolvedEntry] = (),
    names: ModelNames | None = None,
) -> list[Optimizer]:
    """Make the optimizers of ``specs``, in their order, over ``parameters``: all trainable ones, by FQN, in registration order.

    Parameters may be fake or real shards. Raises :class:`PlanError` for a selector that matches nothing, a parameter that two
    optimizers or groups have or none has, a factory that raises or gives no optimizer, and one that cannot run in a graph.
    """
    owned = _owned(specs, list(parameters), names)
    return [
        _build(spec, where, _grouped(spec, where, fqns, entries, names), parameters)
        for (spec, where), fqns in zip(_named(specs), owned, strict=True)
    ]


def _named(specs: Sequence[Spec]) -> list[tuple[Spec, str]]:
    """Each with what to call its table."""
    if len(specs) == 1:
        return [(specs[0], "[optimizer]")]
    return [(spec, f"[[optimizer]] {number}") for number, spec in enumerate(specs, 1)]


def _owned(specs: Sequence[Spec], fqns: Sequence[str], names: ModelNames | None) -> list[list[str]]:
    """The parameters of each optimizer."""
    wheres = [where for _, where in _named(specs)]
    open_ones = [where for spec, where in _named(specs) if not spec.params]
    if len(open_ones) > 1:
        raise PlanError(
            f"{open_ones[0]} and {open_ones[1]} both name no params, so each would have all that no other has; name them"
        )
    claims = [_selected(spec.params, fqns, f"{where} params", names) if spec.params else [] for spec, where in _named(specs)]
    owners = _owners(claims, wheres)
    rest = [fqn for fqn in fqns if fqn not in owners]
    if rest and not open_ones:
        raise PlanError(f"no [[optimizer]] has the trainable parameter {rest[0]}; add it to params, or leave one's params out")
    found = [claim if spec.params else rest for spec, claim in zip(specs, claims, strict=True)]
    if empty := next((where for where, claim in zip(wheres, found, strict=True) if not claim), None):
        raise PlanError(f"{empty} has no parameter left; the others have them all, so take it out")
    return found


def _owners(claims: Sequence[Sequence[str]], wheres: Sequence[str]) -> dict[str, str]:
    owners: dict[str, str] = {}
    for claim, where in zip(claims, wheres, strict=True):
        for fqn in claim:
            if fqn in owners:
                raise PlanError(f"{owners[fqn]} and {where} both have the parameter {fqn}; let one of them have it")
            owners[fqn] = where
    return owners


def _selected(entries: Sequence[Entry], fqns: Sequence[str], where: str, names: ModelNames | None) -> list[str]:
    """The parameters that selectors name, in registration order."""
    modules = names.modules if names else _modules(fqns)
    aliases = names.aliases if names else {}
    resolution = resolve(entries, fqns, modules, aliases=aliases, unplanned="allow", where=where, what="trainable parameters")
    wanted = {fqn for entry in resolution.entries for fqn in entry.parameters}
    return [fqn for fqn in fqns if fqn in wanted]


def _modules(fqns: Sequence[str]) -> list[str]:
    parts = [fqn.split(".")[:-1] for fqn in fqns]
    return list(dict.fromkeys(".".join(path[:depth]) for path in parts for depth in range(len(path) + 1)))


def _grouped(
    spec: Spec, where: str, fqns: Sequence[str], entries: Sequence[ResolvedEntry], names: ModelNames | None
) -> list[tuple[list[str], dict[str, Any]]]:
    """Parameters and options of each group of one optimizer."""
    if spec.groups == "one":
        return [(list(fqns), {})]
    if spec.groups == "entry":
        groups = [[fqn for fqn in fqns if fqn in entry.parameters] for entry in entries]
        rest = set(fqns).difference(*groups)
        return [(group, {}) for group in (*groups, [fqn for fqn in fqns if fqn in rest]) if group]
    if isinstance(spec.groups, str):
        raise PlanError(f'{where} groups is "{spec.groups}", expected "one", "entry" or a list of tables')
    return _listed(spec.groups, where, fqns, names)


def _listed(
    tables: Sequence[Mapping[str, object]], where: str, fqns: Sequence[str], names: ModelNames | None
) -> list[tuple[list[str], dict[str, Any]]]:
    """Groups as tables say; one without params has what no other has."""
    wheres = [f"{where} groups {number}" for number in range(1, len(tables) + 1)]
    claims = [
        _selected(cast("tuple[Entry, ...]", table["params"]), fqns, f"{here} params", names) if "params" in table else []
        for table, here in zip(tables, wheres, strict=True)
    ]
    owners = _owners(claims, wheres)
    rest = [fqn for fqn in fqns if fqn not in owners]
    open_ones = [here for table, here in zip(tables, wheres, strict=True) if "params" not in table]
    if len(open_ones) > 1:
        raise PlanError(f"{open_ones[0]} and {open_ones[1]} both name no params; one may, and has what no other group has")
    if rest and not open_ones:
        raise PlanError(
            f"{where} groups leave out the parameter {rest[0]}; add it to one, "
            "or add a group without params, `{}`, which has the rest"
        )
    if open_ones and not rest:
        raise PlanError(f"{open_ones[0]} has no parameter left; the others have them all, so take it out")
    options = [{key: value for key, value in table.items() if key != "params"} for table in tables]
    return [(claim if "params" in table else rest, more) for table, claim, more in zip(tables, claims, options, strict=True)]


def _build(
    spec: Spec, where: str, groups: Sequence[tuple[list[str], dict[str, Any]]], parameters: Mapping[str, torch.Tensor]
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

    specs: tuple[schema.Optimizer, ...]
    trainable: tuple[str, ...]
    """FQNs in registration order."""
    entries: tuple[ResolvedEntry, ...]
    """Of the bucket plan."""
    modules: tuple[str, ...]
    aliases: Mapping[str, str]

    def build(self, parts: Mapping[str, torch.Tensor]) -> list[Optimizer]:
        """The optimizers over ``parts``, which has all parameters by FQN. Raises PlanError as build_optimizers does."""
        return build_optimizers(self.specs, {fqn: parts[fqn] for fqn in self.trainable}, self.entries, self)

    def state(self, parts: Mapping[str, torch.Tensor], with_gradient: set[str]) -> dict[tuple[str, str], torch.Tensor]:
        """State before the first step, and the learning rates, by role and name as graphs' inputs have them."""
        import torch

        optimizers = self.build(parts)
        make_state(optimizers, [part for fqn, part in parts.items() if fqn in with_gradient])
        found = {("state", one.fqn): one.tensor for one in state_tensors(optimizers, parts)}
        return found | {("hyper", fqn): torch.tensor(rate, dtype=torch.float64) for fqn, rate in rates(optimizers).items()}


def optimizing_of(plan: schema.Plan, parameters: Sequence[Parameter], modules: Sequence[str]) -> Optimizing:
    """What makes the optimizers of ``plan``. Raises PlanError for entries that cannot be resolved."""
    aliases = {alias: parameter.fqn for parameter in parameters for alias in parameter.aliases}
    entries = entries_of(plan, [parameter.fqn for parameter in parameters], modules, aliases).entries
    trainable = tuple(parameter.fqn for parameter in parameters if parameter.trainable)
    return Optimizing(plan.optimizer, trainable, entries, tuple(modules), aliases)
