"""``[step]``, ``[optimizer]`` and ``[[optimizer]]``: what they take, and what cannot stand together."""

from __future__ import annotations

import pytest

from pytest_fxbucket.plan import Entry
from suites.plan.plan_texts import BUCKET, MODEL, PARALLEL, SGD, plan_of, refusal

HEAD = f"{MODEL}{PARALLEL}"
BY_SIZE = '[bucket]\nby = "size"\ncap_mb = 25\n'
OF_MANY = '[[optimizer]]\nfactory = "torch.optim:SGD"\n'


def test_a_plan_without_optimizer_has_none() -> None:
    assert plan_of(HEAD, BUCKET, "").optimizer == ()


def test_one_optimizer_and_several_are_read_alike() -> None:
    (one,) = plan_of(HEAD, BUCKET, SGD + "args = { lr = 0.1, fused = true }\n").optimizer
    assert (one.factory, one.args, one.params, one.groups) == ("torch.optim:SGD", {"lr": 0.1, "fused": True}, (), "one")
    assert plan_of(HEAD, BUCKET, OF_MANY).optimizer == plan_of(HEAD, BUCKET, SGD).optimizer
    plan = plan_of(HEAD, BUCKET, f'{OF_MANY}params = ["layers.[0-1]", "norm+output"]\n{OF_MANY}groups = "entry"\n')
    assert [[entry.name for entry in each.params] for each in plan.optimizer] == [["layers.0", "layers.1", "norm+output"], []]
    assert [each.groups for each in plan.optimizer] == ["one", "entry"]


def test_groups_are_tables_with_params_and_arguments_of_their_own() -> None:
    written = 'groups = [{ params = ["norm", "a.[0-1]"], weight_decay = 0.0 }, { params = ["b"], lr = 1e-4 }]\n'
    (one,) = plan_of(HEAD, BUCKET, SGD + written).optimizer
    entries = (Entry("norm", ("norm",)), Entry("a.0", ("a.0",)), Entry("a.1", ("a.1",)))
    assert one.groups == (
        {"params": entries, "weight_decay": 0.0},
        {"params": (Entry("b", ("b",)),), "lr": 1e-4},
    )
    (nested,) = plan_of(HEAD, BUCKET, f'{SGD}[[optimizer.groups]]\nparams = ["b"]\nlr = 1e-4\n').optimizer
    assert nested.groups == one.groups[1:]


def test_values_of_a_step_reach_the_plan() -> None:
    step = plan_of(
        HEAD, BUCKET, f'{SGD}[step]\nmicrobatches = 4\ncheckpoint = ["layers.*"]\nclip_norm = 1\nreuse_layers = false\n'
    ).step
    assert (step.microbatches, step.clip_norm, step.reuse_layers) == (4, 1.0, False)
    assert step.checkpoint == (Entry("layers.*", ("layers.*",)),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[step]\nmicrobatches = 0\n", "[step] microbatches must be a whole number of at least 1, not 0"),
        ("[step]\nclip_norm = -1.0\n", "[step] clip_norm must be a number of at least 0, not -1.0"),
        ("[step]\nclip_norm = nan\n", "[step] clip_norm must be a number of at least 0, not nan"),
        ("[step]\nclip_norm = inf\n", "[step] clip_norm must be a number of at least 0, not inf"),
        ("[step]\nclip_norm = true\n", "[step] clip_norm must be a number of at least 0, not true"),
        ('[step]\ncheckpoint = "layers"\n', "[step] checkpoint must be a list of entries such as"),
        ("[step]\nreuse_layers = 1\n", "[step] reuse_layers must be true or false, not 1"),
        ("[step]\nclip = 1\n", '[step] has no key "clip"; did you mean "clip_norm"?'),
        ("[optimizer]\nargs = { lr = 0.1 }\n", '[optimizer] factory is missing; it must be "module:callable"'),
        (OF_MANY + "[[optimizer]]\n", '[[optimizer]] 2: factory is missing; it must be "module:callable"'),
        (OF_MANY + "lr = 0.1\n", '[[optimizer]] 1 has no key "lr"'),
        (OF_MANY + OF_MANY + "args = 3\n", "[[optimizer]] 2: args must be a table of keyword arguments, not 3"),
        (f'{SGD}groups = "entries"\n', '[optimizer] groups must be "one", "entry" or a list of tables such as'),
        (f'{SGD}groups = "entrys"\n', 'not "entrys"; did you mean "entry"?'),
        (SGD + "groups = []\n", ", not an empty list"),
        (SGD + "groups = [3]\n", "[optimizer] groups[0] must be a table such as { params ="),
        (SGD + 'groups = [{ params = "a" }]\n', '[optimizer] groups[0] params must be a list of entries such as ["embed",'),
        (SGD + "groups = [{ params = [] }]\n", "[optimizer] groups[0] has an empty params; name the modules"),
        (SGD + 'groups = [{ params = ["a..b"] }]\n', '[optimizer] groups[0] params: entry "a..b" is no name'),
        (
            SGD + 'groups = [{ params = ["a"], "l r" = 1 }]\n',
            '[optimizer] groups[0] has "l r", which is no name of an argument',
        ),
    ],
)
def test_a_value_that_a_step_does_not_take_is_named_with_what_was_expected(text: str, says: str) -> None:
    assert says in refusal(HEAD, BUCKET, text)


def test_an_optimizer_written_as_a_value_is_refused() -> None:
    assert refusal("optimizer = 3", HEAD, BUCKET) == "[optimizer] must be a table, not 3"
    assert refusal("optimizer = [3]", HEAD, BUCKET) == "[[optimizer]] 1 must be a table, not 3"


@pytest.mark.parametrize(
    ("text", "bucket", "says"),
    [
        (
            "[step]\nclip_norm = 1.0\n",
            BUCKET,
            "[step] clip_norm = 1 clips what an optimizer sees, and there is no [optimizer]; add one, or leave clip_norm out",
        ),
        (
            '[overlap]\nupdates = "ready"\n',
            BUCKET,
            '[overlap] updates = "ready" places an optimizer\'s updates, and there is no [optimizer]; '
            "add one, or leave updates out",
        ),
        (
            SGD + 'groups = "entry"\n',
            BY_SIZE,
            '[optimizer] groups = "entry" needs entries, and by = "size" makes none; use groups = "one"',
        ),
        (
            f'{OF_MANY}params = ["a"]\n{OF_MANY}groups = "entry"\n',
            BY_SIZE,
            '[[optimizer]] 2: groups = "entry" needs entries, and by = "size" makes none; use groups = "one"',
        ),
        (
            f'{OF_MANY}{OF_MANY}params = ["a"]\n{OF_MANY}',
            BUCKET,
            "[[optimizer]] 1 and 3 both leave params out, and only one can have all the rest; name those of the other",
        ),
    ],
)
def test_keys_of_a_step_that_cannot_stand_together_are_named(text: str, bucket: str, says: str) -> None:
    assert refusal(HEAD, bucket, text) == says


def test_updates_that_are_placed_by_size_need_no_entries() -> None:
    assert plan_of(HEAD, BY_SIZE, f'{SGD}[overlap]\nupdates = "ready"\n').overlap.updates == "ready"
