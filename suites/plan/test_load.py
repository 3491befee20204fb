"""Plan files: what a good one gives, and the one sentence that a bad one gives."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_fxbucket.plan import Entry, PlanError, load_plans, parse_plans
from suites.plan.plan_texts import refusal

PATH = Path("p.toml")
BASE = {
    "model": 'factory = "m:build"\nbatch = "m:batch"',
    "parallel": "dp_shard = 4",
    "bucket": 'plan = ["embed", "layers.[0-1]", "norm+output"]',
}


def text(extra: str = "", **tables: str) -> str:
    parts = {**BASE, **tables}
    return "\n".join([f"[{name}]\n{body}\n" for name, body in parts.items() if body != "-"]) + extra


def test_a_small_plan_gets_every_default_of_the_design() -> None:
    (plan,) = parse_plans(text(), PATH)
    assert plan.path == PATH
    assert plan.matrix_id is None
    assert plan.model is not None
    assert (plan.model.factory, plan.model.batch, plan.model.loss) == ("m:build", "m:batch", None)
    assert plan.bucket.plan == (
        Entry("embed", ("embed",)),
        Entry("layers.0", ("layers.0",)),
        Entry("layers.1", ("layers.1",)),
        Entry("norm+output", ("norm", "output")),
    )
    assert (plan.parallel.mode, plan.parallel.reshard_after_forward, plan.parallel.param_dtype) == (
        "fully_shard",
        None,
        None,
    )
    assert (plan.overlap.prefetch, plan.overlap.defer_reduce) == (1, True)
    assert (plan.run.steps, plan.run.timeout_s, plan.run.backend) == (3, 120.0, "auto")
    checks = plan.checks
    assert (checks.audit, checks.golden, checks.collectives, checks.bitwise, checks.benchmark) == (True,) * 4 + (False,)


def test_values_of_every_kind_reach_the_plan() -> None:
    (plan,) = parse_plans(
        text(
            model='factory = "a.b:make.it"\nargs = { layers = 2, deep = { y = [1] } }\nbatch = "m:b"\nloss = "m:l"',
            parallel='dp_shard = 256\nparam_dtype = "bfloat16"\nreshard_after_forward = false',
            run='world = { dp_shard = 4 }\ntimeout_s = 2.5\nbackend = "gloo"',
            overlap="launch_at = { forward = {}, backward = {} }\nprefetch = 0",
            checks="golden = false\nbitwise = {}",
        ),
        PATH,
    )
    assert plan.model is not None
    assert plan.model.args == {"layers": 2, "deep": {"y": [1]}}
    assert plan.overlap.launch_at == {}
    assert (plan.checks.golden, plan.checks.bitwise) == (False, True)
    assert (plan.world_size, plan.run_world) == (256, 4)


def test_the_run_is_on_the_whole_mesh_unless_a_smaller_world_is_asked_for() -> None:
    (plan,) = parse_plans(text(), PATH)
    assert (plan.world_size, plan.run_world) == (4, 4)


def test_a_plan_survives_the_way_to_another_process() -> None:
    source = text('\n[[matrix]]\nid = "x"\nrun.steps = 1\n')
    for plan in parse_plans(source, PATH):
        assert pickle.loads(pickle.dumps(plan)) == plan
    assert parse_plans(source, PATH) == parse_plans(source, PATH)
    assert parse_plans(source, PATH)[0] != parse_plans(source, PATH)[1]


def test_graphs_that_someone_else_traced_stand_for_a_model() -> None:
    (plan,) = parse_plans(text(model="-", graph='factory = "t:step"'), PATH)
    assert plan.model is None
    assert plan.graph is not None
    assert plan.graph.factory == "t:step"


@pytest.mark.parametrize(
    ("source", "line", "says"),
    [
        ("[model]\nfactory = \n", 2, "invalid value"),
        ("[model]\nfactory = 'a'\nfactory = 'b'\n", 3, "cannot overwrite"),
        ("[model]\na = [1,\n", 2, ""),
    ],
)
def test_a_file_that_is_not_toml_is_named_with_its_line(source: str, line: int, says: str) -> None:
    message = refusal(source)
    assert message.startswith(f"{line}: this is not TOML: ")
    assert says in message


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"gone\.toml: the plan cannot be read: No such file"):
        load_plans(tmp_path / "gone.toml")
    (tmp_path / "latin.toml").write_bytes(b"[model]\n# caf\xe9\n")
    with pytest.raises(PlanError, match=r"latin\.toml:2: a plan must be UTF-8"):
        load_plans(tmp_path / "latin.toml")
    deep = "a = " + "[" * 100_000
    with pytest.raises(PlanError, match="nested too deep"):
        parse_plans(deep, PATH)


def test_a_windows_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbf" + text().replace("\n", "\r\n").encode())
    assert load_plans(path)[0].parallel.dp_shard == 4


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"paralell": "dp_shard = 4"}, 'there is no table [paralell]; did you mean "parallel"?'),
        ({"overlap": "prefetsch = 2"}, '[overlap] has no key "prefetsch"; did you mean "prefetch"?'),
        ({"model": BASE["model"] + "\nseed = 1"}, '[model] has no key "seed"; seed is a key of [run]'),
        ({"run": "zzzz = 1"}, '[run] has no key "zzzz"; known are backend, world, steps, seed, timeout_s'),
        ({"checks": "golden = { strict = true }"}, '[checks] golden has no key "strict"; this check has no options'),
        ({"checks": "audits = true"}, '[checks] has no key "audits"; did you mean "audit"?'),
        ({"run": "world = { dp_shart = 4 }"}, '[run] world has no key "dp_shart"; did you mean "dp_shard"?'),
        ({"run": 'backend = "nccl:cuda"'}, 'must be "auto", "gloo", "gloo:cuda", "nccl", "local" or "fake", not "nccl:cuda"'),
        ({"bucket": 'layout = "registartion"'}, 'not "registartion"; did you mean "registration"?'),
        ({"parallel": 'dp_shard = 4\nparam_dtype = "bf16"'}, '[parallel] param_dtype must be "float32", "bfloat16"'),
        ({"parallel": "dp_shard = true"}, "[parallel] dp_shard must be a whole number of at least 1, not true"),
        ({"parallel": "dp_shard = 4.0"}, "[parallel] dp_shard must be a whole number of at least 1, not 4.0"),
        ({"parallel": "dp_shard = 0"}, "[parallel] dp_shard must be a whole number of at least 1, not 0"),
        (
            {"parallel": "dp_shard = 4\nmode = 3"},
            '[parallel] mode must be "fully_shard", "replicate", "hybrid_shard" or "module:callable", not 3',
        ),
        ({"parallel": 'dp_shard = 4\nmode = "fsdp"'}, 'not "fsdp"; did you mean "fully_shard"?'),
        ({"parallel": 'dp_shard = 4\nmode = "DDP"'}, 'not "DDP"; did you mean "replicate"?'),
        ({"parallel": 'dp_shard = 4\nmode = "hsdp"'}, 'not "hsdp"; did you mean "hybrid_shard"?'),
        ({"parallel": 'dp_shard = 4\nmode = "hybrid"'}, 'not "hybrid"; did you mean "hybrid_shard"?'),
        (
            {"parallel": "dp_shard = 4\nreshard_after_forward = 1"},
            "reshard_after_forward must be true, false or a table such as",
        ),
        ({"parallel": "dp_shard = 4\nreshard_after_forward = {}"}, "reshard_after_forward must be true, false or a table such"),
        (
            {"parallel": 'dp_shard = 4\nreshard_after_forward = { "norm" = 2 }'},
            'reshard_after_forward."norm" must be true or false',
        ),
        ({"parallel": 'dp_shard = 4\nreshard_after_forward = { "a..b" = true }'}, 'entry "a..b" is no name'),
        ({"bucket": "enabled = 1"}, "[bucket] enabled must be true or false, not 1"),
        ({"bucket": 'plan = "layers"'}, '[bucket] plan must be a list of entries such as ["embed",'),
        ({"bucket": 'cap_mb = "a"'}, "[bucket] cap_mb must be a number of MB from 0, or a list of them"),
        ({"bucket": "cap_mb = [25, true]"}, "[bucket] cap_mb[1] must be a number of MB from 0, not true"),
        ({"bucket": "cap_mb = []"}, "[bucket] cap_mb must be a number of MB from 0, or a list of them, not an empty list"),
        ({"bucket": "cap_mb = -1"}, "[bucket] cap_mb must be"),
        ({"bucket": "cap_mb = nan"}, "[bucket] cap_mb must be"),
        (
            {"bucket": 'packer = "defualt"'},
            '[bucket] packer must be "default" or "module:callable", not "defualt"; did you mean',
        ),
        ({"bucket": "packer = 3"}, '[bucket] packer must be "default" or "module:callable", not 3'),
        ({"bucket": 'dtypes = "mix"'}, '[bucket] dtypes must be "separate" or "mixed", not "mix"; did you mean "mixed"?'),
        ({"overlap": 'gather_group = "mine"'}, '[overlap] gather_group must be "same", "own" or "backward", not "mine"'),
        ({"overlap": 'insert_overlap_deps = "yes"'}, "[overlap] insert_overlap_deps must be true or false"),
        ({"run": "steps = 0"}, "[run] steps must be a whole number of at least 1, not 0"),
        ({"run": "timeout_s = 0"}, "[run] timeout_s must be a number of seconds above 0, not 0"),
        ({"run": "timeout_s = inf"}, "[run] timeout_s must be a number of seconds above 0, not inf"),
        ({"run": "timeout_s = nan"}, "[run] timeout_s must be a number of seconds above 0, not nan"),
        ({"run": f"timeout_s = 1{'0' * 400}"}, "[run] timeout_s must be a number of seconds above 0, not 1000"),
        ({"run": "seed = -1"}, "[run] seed must be a whole number of at least 0, not -1"),
        ({"run": "world = 4"}, "[run] world must be a table such as { dp_shard = 4 }, not 4"),
        ({"run": "world = { dp_shard = 1 }"}, "[run] world.dp_shard must be a whole number of at least 2, not 1: along one"),
        ({"run": "world = { dp_shard = 0 }"}, "[run] world.dp_shard must be a whole number of at least 2, not 0"),
        ({"overlap": "prefetch = -1"}, "[overlap] prefetch must be a whole number of at least 0, not -1"),
        ({"checks": 'audit = "yes"'}, '[checks] audit must be true, false or a table, not "yes"'),
        (
            {"model": 'factory = "m.build"\nbatch = "m:b"'},
            '[model] factory must be "module:callable", not "m.build"; did you mean "m:build"?',
        ),
        (
            {"optimizer": 'factory = "torch.optim.AdamW"'},
            '[optimizer] factory must be "module:callable", not "torch.optim.AdamW"; did you mean "torch.optim:AdamW"?',
        ),
        ({"bucket": 'packer = "ddp"'}, 'not "ddp"'),
        ({"model": BASE["model"] + "\nargs = 3"}, "[model] args must be a table of keyword arguments, not 3"),
        ({"model": BASE["model"] + '\nargs = { "a b" = 3 }'}, '[model] args has "a b"'),
        (
            {"model": BASE["model"] + "\ninputs = []"},
            '[model] inputs must be a list of names or positions such as ["input_ids"',
        ),
        ({"model": BASE["model"] + '\ninputs = "x"'}, "[model] inputs must be a list of names or positions"),
        ({"model": BASE["model"] + "\ninputs = [-1]"}, "[model] inputs[0] must be a key of the batch, a position from 0, or"),
        ({"model": BASE["model"] + '\ninputs = ["a..b"]'}, '[model] inputs[0] = "a..b" is no path; write keys and positions'),
        ({"model": BASE["model"] + '\ninputs = ["*.x"]'}, '[model] inputs[0] = "*.x" is no path'),
        ({"model": BASE["model"] + '\ninputs = ["x", "x"]'}, '[model] inputs has "x" twice; name it once'),
        ({"model": 'factory = "m:b"'}, '[model] batch is missing; it must be "module:callable"'),
        (
            {"step": "reuse_layers = true"},
            "[step] reuse_layers = true is not built yet; layers are traced whole, so leave the key out",
        ),
        ({"checks": "benchmark = 1"}, "[checks] benchmark must be true, false or a table, not 1"),
        ({"checks": "benchmark = { treshold = 0.1 }"}, '[checks] benchmark has no key "treshold"; did you mean "threshold"?'),
        ({"checks": "benchmark = { a = 1 }"}, 'no key "a"; known are threshold, precision, budget_s, against'),
        (
            {"checks": 'benchmark = { threshold = "3%" }'},
            "benchmark.threshold must be a number from 0 and below 1, such as 0.03",
        ),
        ({"checks": "benchmark = { threshold = 3 }"}, "benchmark.threshold must be a number from 0 and below 1, such as 0.03"),
        (
            {"checks": "benchmark = { threshold = nan }"},
            "benchmark.threshold must be a number from 0 and below 1, such as 0.03",
        ),
        ({"checks": "benchmark = { budget_s = 0 }"}, "benchmark.budget_s must be a number of seconds above 0, not 0"),
        ({"checks": "benchmark = { against = 'torch' }"}, 'benchmark.against must be a list of passes, each "torch" or'),
        (
            {"checks": "benchmark = { against = ['torhc'] }"},
            'against[0] must be "torch" or "module:callable", not "torhc"; did',
        ),
        ({"checks": "benchmark = { against = ['torch', 'torch'] }"}, 'benchmark.against has "torch" twice; name it once'),
        # Numbers that nobody can mean.
        ({"run": f"seed = {'9' * 5000}"}, "12: a number there has more digits than Python reads"),
        ({"run": f"# {'9' * 5000}\nseed = {'9' * 5000}"}, "13: a number there has more digits than Python reads"),
        ({"run": f"compiler = '{'9' * 5000}'\nseed = {'9_' * 5000}9"}, "13: a number there has more digits than Python reads"),
        ({"run": f"seed = 0x{'f' * 5000}"}, "seed must be at most 9223372036854775807, not a number of 20000 bits"),
        ({"run": f"steps = -0b1{'0' * 5000}"}, "this is not TOML"),
        ({"run": "seed = 18446744073709551616"}, "seed must be at most 9223372036854775807, not 18446744073709551616"),
        ({"run": "timeout_s = 1e7"}, "timeout_s must be at most 1000000 seconds, not 10000000.0"),
        ({"run": "world = { dp_shard = 10000000000000000000000 }"}, "world.dp_shard must be at most 131072, not 1000000"),
        ({"parallel": "dp_shard = 10000000000000000000000"}, "[parallel] dp_shard must be at most 131072, not 1000000"),
        (
            {"parallel": 'mode = "hybrid_shard"\ndp_shard = 4096\ndp_replicate = 4096'},
            "[parallel] makes a mesh of 16777216 ranks, and at most 131072 can be looked at",
        ),
    ],
)
def test_a_wrong_name_or_value_is_told_with_what_was_expected(tables: dict[str, str], says: str) -> None:
    assert says in refusal(text(**tables))


def test_a_key_outside_any_table_is_shown_its_table() -> None:
    assert refusal("steps = 3\n" + text()) == "there is no table [steps]; steps is a key of [run]"


def test_a_table_written_as_a_value_is_refused() -> None:
    assert refusal("parallel = 4\n" + text(parallel="-")) == "[parallel] must be a table, not 4"


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"graph": 'factory = "t:step"'}, "[model] and [graph] are both there; keep the one that is to be checked"),
        ({"model": "-"}, "there is neither [model] nor [graph]; one of them says what is checked"),
        ({"bucket": "-"}, "[bucket] plan has no entry; name one, or use"),
    ],
)
def test_keys_that_contradict_each_other_are_named_together(tables: dict[str, str], says: str) -> None:
    assert refusal(text(**tables)).startswith(says)


@pytest.mark.parametrize("bucket", ['unplanned = "root"', "enabled = false"])
def test_a_plan_without_entries_is_fine_where_it_has_a_meaning(bucket: str) -> None:
    assert parse_plans(text(bucket=bucket), PATH)[0].bucket.plan == ()


def test_reading_plans_does_not_import_torch_or_pytest() -> None:
    code = "import sys, pytest_fxbucket.plan, pytest_fxbucket.cli.__main__; print({'torch', 'pytest'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
