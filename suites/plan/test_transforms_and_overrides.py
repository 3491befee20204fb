"""Tables under [[transform]] and [[override]]: what cannot stand together, or beside others."""

from __future__ import annotations

import pytest

from suites.plan.plan_texts import BUCKET, GRAPH, MODEL, PARALLEL, SGD, plan_of, plans_of, refusal

HEAD = f"{MODEL}{PARALLEL}"
MOVES = '[[transform]]\nname = "next_iteration"\nargs = { entries = ["b"] }\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MOVES + MOVES, "1 and 2 are both next_iteration; list all its entries in one"),
        (
            MOVES + '[[transform]]\nname = "m:mine"\n',
            "1: next_iteration gives three graphs, and m:mine stands behind it; list it last",
        ),
        (
            "[step]\nclip_norm = 1.0\n" + MOVES,
            "1: next_iteration moves updates, and [step] clip_norm makes each of them need the reductions of all; leave one of "
            "them out",
        ),
        (
            '[overlap]\ninsert_overlap_deps = true\n[[transform]]\nname = "bucket"\n' + MOVES,
            "2: next_iteration moves what [overlap] insert_overlap_deps = true would hold in its place; leave that out",
        ),
    ],
)
def test_what_next_iteration_cannot_stand_with(text: str, says: str) -> None:
    assert refusal(HEAD, SGD, BUCKET, text) == f"[[transform]] {says}"


def test_next_iteration_stands_last() -> None:
    plan = plan_of(HEAD, SGD, BUCKET, f'[[transform]]\nname = "m:mine"\n{MOVES}')
    assert [one.name for one in plan.transform] == ["m:mine", "next_iteration"]


WRONG = {
    '[override]\nby = "call"': "[override] names no module; give it module, a list of names, or type, a class",
    '[override]\nmodule = ["moe"]\ntype = "a:Moe"': "[override] has both module and type; keep one",
    '[override]\nmodule = ["moe"]\nargs = { experts = 4 }': '[override] has args, which by = "call" does not take',
    '[override]\nmodule = ["moe"]\nby = "a:b"\noutput = "a:c"': '[override] output is for by = "call"',
    '[override]\nmodule = ["moe"]\nby = "real"': '[override] by must be "call" or "module:callable", not "real"',
    '[override]\nmodules = ["moe"]': '[override] has no key "modules"; did you mean "module"?',
    '[override]\nmodule = "moe"': "[override] module must be a list of entries",
    '[override]\ntype = "a.Moe"': '[override] type must be "module:callable", not "a.Moe"; did you mean "a:Moe"?',
    '[[override]]\nmodule = ["moe"]\n[[override]]\nby = "call"': "[[override]] 2: names no module",
    '[overrides]\nmodule = ["moe"]': 'there is no table [overrides]; did you mean "override"?',
}


@pytest.mark.parametrize(("text", "sentence"), WRONG.items())
def test_a_wrong_override_is_one_sentence(text: str, sentence: str) -> None:
    assert refusal(HEAD, BUCKET, text).startswith(sentence)


def test_a_graph_that_is_traced_already_has_nothing_to_override() -> None:
    says = "[override] is for a [model] that is to be traced; leave it out beside"
    assert refusal(GRAPH, PARALLEL, BUCKET, '[override]\nmodule = ["moe"]').startswith(says)


def test_one_or_several_overrides_and_those_of_a_row() -> None:
    text = '[override]\nmodule = ["layers.[0-1].moe"]\n[[matrix]]\nid = "row"\noverride = [{ type = "a:Moe", by = "a:d" }]'
    base, row = plans_of(HEAD, BUCKET, text)
    (one,), (other,) = base.override, row.override
    assert [entry.name for entry in one.module] == ["layers.0.moe", "layers.1.moe"]
    assert (one.type, one.by, dict(one.args), one.output) == (None, "call", {}, None)
    assert (other.module, other.type, other.by) == ((), "a:Moe", "a:d")
