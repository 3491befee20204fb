"""``[override]``: keys that are wrong or contradict each other, each one sentence; and what a plan makes of right ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.load import parse_plans

MODEL = """
[model]
factory = "a:b"
batch = "a:c"
[parallel]
dp_shard = 2
[bucket]
unplanned = "root"
"""
GRAPH = """
[graph]
factory = "a:b"
[parallel]
dp_shard = 2
[bucket]
unplanned = "root"
"""
WRONG = {
    '[override]\nby = "call"': "plan.toml: [override] names no module; give it module, a list of names, or type, a class",
    '[override]\nmodule = ["moe"]\ntype = "a:Moe"': "plan.toml: [override] has both module and type; keep one",
    '[override]\nmodule = ["moe"]\nargs = { experts = 4 }': 'plan.toml: [override] has args, which by = "call" does not take',
    '[override]\nmodule = ["moe"]\nby = "a:b"\noutput = "a:c"': 'plan.toml: [override] output is for by = "call"',
    '[override]\nmodule = ["moe"]\nby = "real"': '[override] by must be "call" or "module:callable", not "real"',
    '[override]\nmodules = ["moe"]': '[override] has no key "modules"; did you mean "module"?',
    '[override]\nmodule = "moe"': "[override] module must be a list of entries",
    '[override]\ntype = "a.Moe"': '[override] type must be "module:callable", not "a.Moe"; did you mean "a:Moe"?',
    '[[override]]\nmodule = ["moe"]\n[[override]]\nby = "call"': "plan.toml: [[override]] 2: names no module",
    '[overrides]\nmodule = ["moe"]': 'there is no table [overrides]; did you mean "override"?',
}


@pytest.mark.parametrize(("text", "sentence"), WRONG.items())
def test_a_wrong_override_is_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=re.escape(sentence)) as caught:
        parse_plans(MODEL + text, Path("plan.toml"))
    assert "\n" not in str(caught.value)


def test_a_graph_that_is_traced_already_has_nothing_to_override() -> None:
    with pytest.raises(PlanError, match=re.escape("[override] is for a [model] that is to be traced; leave it out beside")):
        parse_plans(GRAPH + '[override]\nmodule = ["moe"]', Path("plan.toml"))


def test_one_or_several_overrides_and_those_of_a_row() -> None:
    text = (
        MODEL + '[override]\nmodule = ["layers.[0-1].moe"]\n[[matrix]]\nid = "row"\noverride = [{ type = "a:Moe", by = "a:d" }]'
    )
    base, row = parse_plans(text, Path("plan.toml"))
    (one,), (other,) = base.override, row.override
    assert [entry.name for entry in one.module] == ["layers.0.moe", "layers.1.moe"]
    assert (one.type, one.by, dict(one.args), one.output) == (None, "call", {}, None)
    assert (other.module, other.type, other.by) == ((), "a:Moe", "a:d")
