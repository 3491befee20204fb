"""Plans as text: the least that a plan has, read, and the one sentence that a wrong one gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.plan import Plan, PlanError, parse_plans

MODEL = '[model]\nfactory = "m:build"\nbatch = "m:batch"\n'
GRAPH = '[graph]\nfactory = "m:step"\n'
PARALLEL = "[parallel]\ndp_shard = 4\n"
BUCKET = '[bucket]\nplan = ["a"]\n'
SGD = '[optimizer]\nfactory = "torch.optim:SGD"\n'


def plans_of(*parts: str) -> list[Plan]:
    """The plans of the file that ``parts`` make, with a line feed between them."""
    return parse_plans("\n".join(parts), Path("p.toml"))


def plan_of(*parts: str) -> Plan:
    (plan,) = plans_of(*parts)
    return plan


def refusal(*parts: str) -> str:
    """What is said of the file, without its name."""
    with pytest.raises(PlanError) as caught:
        plans_of(*parts)
    message = str(caught.value)
    assert "\n" not in message, "an error is one sentence on one line"
    assert message.startswith("p.toml:"), "an error names the file first"
    return message.removeprefix("p.toml:").removeprefix(" ")
