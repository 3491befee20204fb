"""Which modules of experts are units of FSDP2, and what each has."""

from __future__ import annotations

import pytest
from torch import nn

from pytest_fxbucket.capture.names import names_of
from pytest_fxbucket.eager.expert_parallel import ExpertUnit, units_of_experts
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.selectors import resolve


class Experts(nn.Module):
    """Two modules, and a parameter beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.scale = nn.Parameter(self.up.weight[0].detach())


class Model(nn.Module):
    """Two modules of experts; a norm is none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = Experts(), nn.LayerNorm(2), Experts()


A, B = ("a.up.weight", "a.down.weight", "a.scale"), ("b.up.weight", "b.down.weight", "b.scale")
CASES: dict[str, tuple[list[str], dict[str, ExpertUnit]]] = {
    "each by itself": (["a", "b"], {"a": ExpertUnit(("a",), A), "b": ExpertUnit(("b",), B)}),
    "together, as the entry has them": (["b+norm+a"], {"b+norm+a": ExpertUnit(("b", "a"), B + A)}),
    "in no entry": (["norm"], {"no entry": ExpertUnit(("a", "b"), A + B)}),
    "within": (
        ["a.down", "b.down+a.up"],
        {
            "b.down+a.up": ExpertUnit(("b.down", "a.up"), ("b.down.weight", "a.up.weight")),
            "a.down": ExpertUnit(("a.down",), ("a.down.weight",)),
            "no entry": ExpertUnit(("a", "b.up", "b"), ("a.scale", "b.up.weight", "b.scale")),
        },
    ),
}


@pytest.mark.parametrize(("entries", "units"), CASES.values(), ids=CASES.keys())
def test_what_an_entry_has_of_experts_is_a_unit(entries: list[str], units: dict[str, ExpertUnit]) -> None:
    model = Model()
    modules, names = [fqn for fqn, _ in model.named_modules()], names_of(model)
    resolved = resolve(parse_entries(entries, "plan"), names, modules, aliases=names, unplanned="allow").entries
    expected = {f"the experts of {name}": unit for name, unit in units.items()}
    assert units_of_experts(model, ["a", "b"], resolved) == expected
