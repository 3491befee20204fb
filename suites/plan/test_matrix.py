"""``[[matrix]]``: one more plan for each row, checked as strictly as the plan itself."""

from __future__ import annotations

import pytest

from pytest_fxbucket.plan import Plan
from suites.plan.plan_texts import BUCKET, MODEL, PARALLEL, plans_of, refusal

BASE = f'{MODEL}args = {{ layers = 4, dim = 64 }}\n{PARALLEL}param_dtype = "bfloat16"\n{BUCKET}'


def plans(rows: str) -> list[Plan]:
    return plans_of(BASE, rows)


def test_rows_come_after_the_base_in_the_order_of_the_file_and_change_only_their_keys() -> None:
    base, second, first = plans(
        '[[matrix]]\nid = "z"\nparallel.param_dtype = "float32"\n[[matrix]]\nid = "a"\n"run.steps" = 7\nchecks.golden = false\n'
    )
    assert [plan.matrix_id for plan in (base, second, first)] == [None, "z", "a"]
    assert (base.parallel.param_dtype, second.parallel.param_dtype, first.parallel.param_dtype) == (
        "bfloat16",
        "float32",
        "bfloat16",
    )
    assert (base.run.steps, second.run.steps, first.run.steps) == (3, 3, 7)
    assert (first.checks.golden, first.checks.audit) == (False, True)
    assert second.parallel.dp_shard == 4


def test_an_override_replaces_the_whole_value_and_does_not_merge_into_it() -> None:
    _, row = plans('[[matrix]]\nid = "small"\nmodel.args = { layers = 2 }\nbucket.plan = ["b"]\n')
    assert row.model is not None
    assert row.model.args == {"layers": 2}
    assert [entry.name for entry in row.bucket.plan] == ["b"]


def test_a_row_is_no_trace_in_the_next_row() -> None:
    _, first, second = plans('[[matrix]]\nid = "x"\nparallel.dp_shard = 8\n[[matrix]]\nid = "y"\nrun.seed = 1\n')
    assert (first.parallel.dp_shard, second.parallel.dp_shard) == (8, 4)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("[[matrix]]\nrun.steps = 1\n", "[[matrix]] row 1 has no id"),
        (
            '[[matrix]]\nid = "a b"\nrun.steps = 1\n',
            'row 1: id must be a string of at most 100 letters, digits, _ . and -, with no . or - at its ends, not "a b"',
        ),
        *((f'[[matrix]]\nid = "{name}"\nrun.steps = 1\n', "row 1: id must be") for name in ("", "a.", "-a", "a/b")),
        (f'[[matrix]]\nid = "{"x" * 101}"\nrun.steps = 1\n', "row 1: id must be a string of at most 100"),
        ("[[matrix]]\nid = 3\nrun.steps = 1\n", "row 1: id must be"),
        ('[[matrix]]\nid = "x"\nrun.steps = 1\n[[matrix]]\nid = "x"\nrun.steps = 2\n', '[[matrix]] "x" is there twice'),
        ('[[matrix]]\nid = "x"\n', '[[matrix]] "x" overrides no key'),
        ('[[matrix]]\nid = "x"\nrn.steps = 1\n', '"x": there is no table "rn"; did you mean "run"?'),
        ('[[matrix]]\nid = "x"\nrun.stepz = 1\n', '"x": [run] has no key "stepz"; did you mean "steps"?'),
        ('[[matrix]]\nid = "x"\n"run.stepz" = 1\n', '"x": [run] has no key "stepz"; did you mean "steps"?'),
        (
            '[[matrix]]\nid = "x"\n"model.args.layers" = 1\n',
            '"x": [model] has no key "args.layers"; did you mean "args"?',
        ),
        (
            '[[matrix]]\nid = "x"\nparallel = 4\n',
            '"x": parallel must be followed by one of its keys, as in parallel.mode',
        ),
        ('[[matrix]]\nid = "x"\n"run.steps" = 1\nrun.steps = 2\n', '"x": run.steps is set twice'),
        (
            '[[matrix]]\nid = "x"\nrun.steps = 0\n',
            '[[matrix]] "x": [run] steps must be a whole number of at least 1, not 0',
        ),
        ('[[matrix]]\nid = "x"\nparallel.pp = 2\n', '[[matrix]] "x": [parallel] pp = 2 has no stages to spread'),
        ('[[matrix]]\nid = "x"\nparallel.dp_shard = 1\n', '"x": [parallel] dp_shard = 1 leaves nothing to shard'),
        ('[[matrix]]\nid = "x"\ngraph.factory = "t:s"\n', '"x": [model] and [graph] are both there'),
        ('[[matrix]]\nid = "x"\noptimizer.args = { lr = 1 }\n', '"x": [optimizer] factory is missing'),
        (
            '[[matrix]]\nid = "x"\noptimizer = "t:s"\n',
            '"x": optimizer must be followed by one of its keys, as in optimizer.factory = ..., not "t:s"',
        ),
        ('[[matrix]]\nid = "x"\noptimizer = [{ factory = "t:s" }, 3]\n', '"x": [[optimizer]] 2 must be a table, not 3'),
        ('[[matrix]]\nid = "x"\noptimizer = [{ factori = "t:s" }]\n', '"x": [[optimizer]] 1 has no key "factori"; did'),
        ('[[matrix]]\nid = "x"\nparallel = [{ dp_shard = 4 }]\n', '"x": parallel must be followed by one of its keys'),
        ("[matrix]\nid = 1\n", "[[matrix]] must be tables, each under [[matrix]], not a table"),
    ],
)
def test_a_bad_row_is_named_with_its_id_and_key(rows: str, says: str) -> None:
    assert says in refusal(BASE, rows)


@pytest.mark.parametrize("name", ["x", "con", "a..b", "fp32_2-4.x", "_", "x" * 100])
def test_an_id_that_can_be_part_of_a_file_name_is_taken(name: str) -> None:
    assert plans(f'[[matrix]]\nid = "{name}"\nrun.steps = 1\n')[1].matrix_id == name


SGD, ADAM = '{ factory = "torch.optim:SGD", args = { lr = 0.1 } }', '{ factory = "torch.optim:Adam", params = ["a"] }'


def optimizers_of(base: str, row: str) -> list[tuple[str, object]]:
    """Factory and args of each optimizer in the plan of a row."""
    plan = plans(f'{base}\n[[matrix]]\nid = "x"\n{row}\n')[1]
    return [(one.factory.removeprefix("torch.optim:"), one.args) for one in plan.optimizer]


def test_a_row_sets_keys_of_the_one_optimizer_that_there_is() -> None:
    for base in ('[optimizer]\nfactory = "torch.optim:SGD"', '[[optimizer]]\nfactory = "torch.optim:SGD"'):
        assert optimizers_of(base, "optimizer.args = { lr = 0.5 }") == [("SGD", {"lr": 0.5})]
    assert optimizers_of("", 'optimizer.factory = "torch.optim:SGD"') == [("SGD", {})]


def test_a_row_with_a_list_of_optimizers_has_those_and_no_other() -> None:
    base = '[optimizer]\nfactory = "torch.optim:AdamW"'
    assert optimizers_of(base, f"optimizer = [{SGD}, {ADAM}]") == [("SGD", {"lr": 0.1}), ("Adam", {})]
    assert optimizers_of(base, '[[matrix.optimizer]]\nfactory = "torch.optim:SGD"') == [("SGD", {})]
    assert optimizers_of(base, "optimizer = []") == []


def test_a_key_of_one_of_several_optimizers_is_refused_with_how_to_write_all() -> None:
    two = '[[optimizer]]\nfactory = "torch.optim:SGD"\n[[optimizer]]\nfactory = "torch.optim:Adam"\nparams = ["a"]'
    assert refusal(BASE, two, '[[matrix]]\nid = "x"\noptimizer.args = { lr = 0.5 }') == (
        '[[matrix]] "x": optimizer.args could be of any of 2 [[optimizer]]; write all that the row has, '
        "as in optimizer = [{ factory = ... }]"
    )
