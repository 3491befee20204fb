"""No key of a plan is read and ignored: a second value of each changes the graph, a verdict, or gives an error."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from pytest_fxbucket.capture.last_step import LastStep
from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.plan.schema import Plan, keys
from pytest_fxbucket.plan_on_mesh import text_of
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun, item_names
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.step.portable import digest
from suites.plans.llama import llama
from suites.plans.traced import TRACED

MODEL = """
[model]
factory = "bitwise_models:build"
args = { used = 1.0 }
batch = "bitwise_models:batch"
loss = "bitwise_models:loss"

[parallel]
dp_shard = 2

[bucket]
plan = ["scale+up", "down"]

[run]
steps = 2
"""
HYBRID = MODEL.replace("dp_shard = 2", 'mode = "hybrid_shard"\ndp_replicate = 2\ndp_shard = 2')
REPLICATE = MODEL.replace("dp_shard = 2", 'mode = "replicate"\ndp_replicate = 2')
STAGES = MODEL.replace("dp_shard = 2", "dp_shard = 2\npp = 2") + '[pipeline]\ncuts = ["scale"]\n[step]\nmicrobatches = 2\n'
SGD = MODEL + '[optimizer]\nfactory = "torch.optim:SGD"\nargs = { lr = 0.1 }\n'
LINEARS = {"w1": "colwise", "w3": "colwise", "w2": "rowwise"}
TENSOR = llama(
    "layers = 1, dim = 16", tp=2, tp_plan={f"layers.*.feed_forward.{name}": style for name, style in LINEARS.items()}
)
CONTEXT = llama("layers = 1, dim = 16", 1, cp=2).replace("models.llama:", "models.llama_sdpa:")
EXPERTS = """
[model]
factory = "fixtures.models.moe:build"
batch = "fixtures.models.moe:batch"
loss = "fixtures.models.moe:loss"

[parallel]
dp_shard = 4
ep = 2
ep_plan = ["layers.0.experts"]

[bucket]
plan = ["embed", "layers.*", "norm+output"]
"""
CLUSTER = (
    MODEL
    + """
[cluster]
preset = "cpu-gloo"

[checks]
overlap = { exposed_max_ms = 0 }
memory = { peak_max_gb = 1e-9 }
"""
)
H100 = '[cluster]\npreset = "h100-sxm"\n'
SIMULATED = MODEL + H100
LARGE = llama("layers = 2, dim = 64") + H100
AUTO = 'overlap.schedule = "auto"'


class Case(NamedTuple):
    """A second value of a key, and where it shows."""

    value: str
    sees: str
    """error, unbucketed (graph), passed (graph), schedule, items, audit, bitwise, overlap, memory (verdicts)."""
    words: str = ""
    """What the error or the verdict says."""
    also: str = ""
    """Lines of both rows."""
    base: str = MODEL


NOT_BUILT = "not built yet"
CASES: dict[tuple[str, str], Case] = {
    ("model", "factory"): Case('"bitwise_models:build_deeper"', "unbucketed"),
    ("model", "args"): Case("{ used = 3.0 }", "unbucketed"),
    ("model", "batch"): Case('"bitwise_models:equal_batch"', "bitwise", "all ranks got the same batch"),
    ("model", "loss"): Case('"bitwise_models:other_loss"', "unbucketed"),
    ("model", "inputs"): Case(
        "[0]", "unbucketed", also='model.factory = "effects_models:shifted"\nmodel.batch = "effects_models:two_inputs"'
    ),
    ("model", "may_be_idle"): Case('["scale"]', "bitwise", "passed", also="model.args = { used = 0.0 }"),
    ("graph", "may_be_idle"): Case(
        '["layers.*"]', "bitwise", "passed", also='graph.factory = "effects_models:unmoved"', base=TRACED
    ),
    ("graph", "factory"): Case('"fixtures.models.traced:bare"', "audit", "needs the roles of the graph", base=TRACED),
    ("parallel", "mode"): Case('"replicate"\nparallel.dp_shard = 1\nparallel.dp_replicate = 2', "unbucketed"),
    ("parallel", "dp_shard"): Case("4", "unbucketed"),
    ("parallel", "dp_replicate"): Case("4", "audit", "as planned on 4 ranks", base=REPLICATE),
    ("parallel", "tp"): Case("4", "unbucketed", base=TENSOR),
    ("parallel", "tp_plan"): Case(
        '{ "layers.*.feed_forward.w1" = "colwise", "layers.*.feed_forward.w3" = "colwise",'
        ' "layers.*.feed_forward.w2" = "rowwise",'
        ' "layers.*.attention.wq" = "colwise", "layers.*.attention.wk" = "colwise", "layers.*.attention.wv" = "colwise",'
        ' "layers.*.attention.wo" = "rowwise" }',
        "unbucketed",
        base=TENSOR,
    ),
    ("parallel", "cp"): Case("4", "unbucketed", base=CONTEXT),
    ("parallel", "cp_form"): Case('"ring"', "unbucketed", base=CONTEXT),
    ("parallel", "ep"): Case("4", "unbucketed", base=EXPERTS),
    ("parallel", "ep_plan"): Case('["layers.*.experts"]', "unbucketed", base=EXPERTS),
    ("parallel", "pp"): Case("4", "error", "pp = 4 does not fit the 2 stages", base=STAGES),
    ("parallel", "param_dtype"): Case('"bfloat16"', "unbucketed"),
    ("parallel", "reduce_dtype"): Case('"float64"', "unbucketed"),
    ("parallel", "reshard_after_forward"): Case("false", "unbucketed"),
    ("parallel", "reduce_order"): Case('"replicate_first"', "unbucketed", base=HYBRID),
    ("pipeline", "cuts"): Case('["scale", "up"]', "error", "does not fit the 3 stages of .pipeline.", base=STAGES),
    ("pipeline", "stages"): Case("3", "error", ".pipeline. has both cuts and stages = 3", base=STAGES),
    ("pipeline", "balance"): Case('"flops"', "error", ".pipeline. balance = .flops. is of cuts that", base=STAGES),
    ("pipeline", "schedule"): Case('"DualPipeV"', "error", ".pipeline., of which schedule = .DualPipeV. has two", base=STAGES),
    ("step", "microbatches"): Case("3", "unbucketed"),
    ("step", "checkpoint"): Case('["up"]', "unbucketed", also='model.factory = "bitwise_models:build_deeper"'),
    ("step", "clip_norm"): Case("0.5", "unbucketed", base=SGD),
    ("step", "reuse_layers"): Case("true", "error", NOT_BUILT),
    ("override", "module"): Case('["scale"]', "unbucketed"),
    ("override", "type"): Case('"bitwise_models:Scale"', "unbucketed"),
    ("override", "by"): Case('"effects_models:scaled"', "unbucketed", also='override.module = ["scale"]'),
    ("override", "args"): Case(
        "{ by = 2.0 }", "unbucketed", also='override.module = ["scale"]\noverride.by = "effects_models:scaled"'
    ),
    ("override", "output"): Case('"effects_models:turned"', "unbucketed", also='override.module = ["scale"]'),
    ("optimizer", "factory"): Case('"torch.optim:Adam"', "unbucketed", base=SGD),
    ("optimizer", "args"): Case("{ lr = 0.1, momentum = 0.9 }", "unbucketed", base=SGD),
    ("optimizer", "params"): Case('["up"]', "audit", "has the trainable parameter scale.weight", base=SGD),
    ("optimizer", "groups"): Case('"entry"', "unbucketed", base=SGD),
    ("optimizer", "schedule"): Case('"builtins:id"', "audit", "builtins:id gave a value of type int, expected a", base=SGD),
    ("bucket", "enabled"): Case("false", "schedule"),
    ("bucket", "plan"): Case('["scale", "up", "down"]', "schedule"),
    ("bucket", "by"): Case('"size"\nbucket.plan = []', "schedule", also="bucket.cap_mb = 25"),
    ("bucket", "layout"): Case('"execution"', "schedule"),
    ("bucket", "dtypes"): Case(
        '"mixed"', "schedule", also='model.factory = "effects_models:of_two_dtypes"\nbucket.plan = ["scale+up+down"]'
    ),
    ("bucket", "cap_mb"): Case("[0.0002, 0]", "schedule"),
    ("bucket", "packer"): Case('"effects_models:joined"', "passed"),
    ("bucket", "unplanned"): Case('"root"', "audit", "3 entries as planned", also='bucket.plan = ["up", "down"]'),
    ("overlap", "schedule"): Case('"auto"', "schedule", base=SIMULATED),
    ("overlap", "max_memory_increase"): Case("0", "audit", "the graph needs", also=AUTO, base=LARGE),
    ("overlap", "max_memory_increase_gb"): Case("0", "audit", "the graph needs", also=AUTO, base=LARGE),
    ("overlap", "max_in_flight_gb"): Case("1e-9", "audit", "has alone", also=AUTO, base=SIMULATED),
    ("overlap", "max_prefetch"): Case("1", "schedule", also=AUTO, base=SIMULATED),
    ("overlap", "prefetch"): Case("0", "schedule"),
    ("overlap", "defer_reduce"): Case("false", "schedule"),
    ("overlap", "updates"): Case('"ready"', "schedule", also='optimizer.groups = "entry"', base=SGD),
    ("overlap", "insert_overlap_deps"): Case("true", "passed"),
    ("overlap", "gather_group"): Case('"own"', "passed"),
    ("overlap", "launch_at"): Case('{ forward = { "down" = "scale+up" } }', "schedule"),
    ("overlap", "wait_before"): Case(
        '{ backward = { "scale" = "down" } }', "schedule", also='bucket.plan = ["scale", "up", "down"]'
    ),
    ("pass", "of"): Case('["nowhere:bucketed"]', "audit", 'there is no module "nowhere"'),
    ("transform", "name"): Case('"effects_models:doubled"', "passed", base=MODEL + '[[transform]]\nname = "bucket"\n'),
    ("transform", "args"): Case("{ factor = 3.0 }", "passed", base=MODEL + '[[transform]]\nname = "effects_models:doubled"\n'),
    ("run", "backend"): Case('"fake"', "bitwise", "back end fake holds no values to compare"),
    ("run", "world"): Case("{ dp_shard = 2 }", "items", "bitwise@2", also="parallel.dp_shard = 4"),
    ("run", "steps"): Case("3", "bitwise", "in 3 steps"),
    ("run", "seed"): Case("7", "bitwise", "is zero on every rank", also='model.factory = "bitwise_models:build_by_seed"'),
    ("run", "timeout_s"): Case("0.001", "bitwise", "0.001"),
    ("run", "reduce"): Case('"ring"', "bitwise", "since round a ring both may rightly part"),
    ("run", "ring"): Case("{ nodes = 3 }", "error", "does not divide the 2 ranks", also='run.reduce = "ring"'),
    ("run", "compiler"): Case('"aot_eager"', "bitwise", "both compiled by aot_eager"),
    ("run", "ranks_per_gpu"): Case(
        "1", "bitwise", "gloo:cuda needs 2 GPUs, this machine has 0", also='run.backend = "gloo:cuda"'
    ),
    ("checks", "audit"): Case("false", "items"),
    ("checks", "golden"): Case("false", "items"),
    ("checks", "collectives"): Case("false", "items"),
    ("checks", "same"): Case("false", "items"),
    ("checks", "bitwise"): Case("false", "items"),
    ("checks", "eager"): Case("false", "items"),
    ("checks", "mutation"): Case("true", "items"),
    ("eager", "factory"): Case('"effects_models:trainer"', "eager", "a trainer of nothing"),
    ("eager", "args"): Case('{ word = "args" }', "eager", "a trainer of args", also='eager.factory = "effects_models:trainer"'),
    ("eager", "rounds_otherwise"): Case('["fused_rnn"]', "eager", 'states "fused_rnn"'),
    ("checks", "benchmark"): Case("true", "items", "benchmark:unbucketed"),
    ("checks", "overlap"): Case("{ exposed_max_ms = 1e9 }", "overlap", "passed", base=CLUSTER),
    ("checks", "memory"): Case("{ peak_max_gb = 1 }", "memory", "passed", base=CLUSTER),
    ("cluster", "preset"): Case('"h100-sxm"', "overlap", "on h100-sxm", base=CLUSTER),
    ("cluster", "tflops"): Case("{ float32 = 1e-6 }", "overlap", base=CLUSTER),
    ("cluster", "memory_bandwidth"): Case("1e-3", "overlap", base=CLUSTER),
    ("cluster", "memory_gb"): Case("3", "memory", "of 3.00 GB", base=CLUSTER),
    ("cluster", "devices_per_node"): Case("1", "overlap", base=CLUSTER),
    ("cluster", "within"): Case("{ bandwidth = 1e-3, latency_us = 50 }", "overlap", base=CLUSTER),
    ("cluster", "between"): Case(
        "{ bandwidth = 1e-3, latency_us = 100 }", "overlap", also="cluster.devices_per_node = 1", base=CLUSTER
    ),
    ("cluster", "compute_efficiency"): Case("0.01", "overlap", also="cluster.tflops = { float32 = 1e-6 }", base=CLUSTER),
    ("cluster", "memory_efficiency"): Case("0.001", "overlap", base=CLUSTER),
    ("cluster", "network_efficiency"): Case(
        "0.1", "overlap", also="cluster.within = { bandwidth = 1e-3, latency_us = 50 }", base=CLUSTER
    ),
    ("cluster", "launch_us"): Case("1000", "overlap", base=CLUSTER),
    ("cluster", "view_us"): Case("1000", "overlap", base=CLUSTER),
    ("cluster", "enqueue_us"): Case("1000", "overlap", base=CLUSTER),
    ("cluster", "enqueue_us_per_mb"): Case("1e9", "overlap", base=CLUSTER),
    ("cluster", "wait_us"): Case("1000", "overlap", base=CLUSTER),
    ("cluster", "kernel_us"): Case("1000", "overlap", base=CLUSTER),
    ("cluster", "collective_us"): Case("1000", "overlap", base=CLUSTER),
    ("cluster", "blocking"): Case("false", "overlap", base=CLUSTER),
    ("cluster", "allocation_bytes"): Case("4096", "memory", base=CLUSTER),
    ("cluster", "cost"): Case('"effects_models:a_second_each"', "overlap", base=CLUSTER),
}
# Take a key out once capture reads it; its test is red then.
PARAMETERS = [pytest.param(*key, id="-".join(key)) for key in CASES]


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_every_key_of_the_schema_has_a_case() -> None:
    assert set(CASES) == {(key.table, key.key) for key in keys()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all, since what is seen may name it."""
    return tmp_path_factory.mktemp("effects")


@pytest.fixture(scope="module")
def last_step() -> LastStep:
    """Rows that trace the same, one after another, are captured once, as those of a file are."""
    return LastStep()


@pytest.fixture(scope="module")
def firsts() -> dict[tuple[str, str, str], str]:
    """What was seen of first rows, by plan, row and where it was looked."""
    return {}


@pytest.mark.parametrize(("table", "key"), PARAMETERS)
def test_a_second_value_is_seen(
    table: str, key: str, folder: Path, firsts: dict[tuple[str, str, str], str], pools: Pools, last_step: LastStep
) -> None:
    case = CASES[table, key]
    path = folder / "plan.toml"
    both = case.also or "run.seed = 0"
    rows = [both, f"{both}\n{table}.{key} = {case.value}"]
    path.write_text(case.base + "".join(f'\n[[matrix]]\nid = "row{i}"\n{row}\n' for i, row in enumerate(rows)))
    if case.sees == "error":
        with pytest.raises(FxbucketError, match=case.words) as caught:
            load_plans(path)
        assert table in str(caught.value)
        return
    _, first, second = load_plans(path)
    known = case.base, both, case.sees
    if known not in firsts:
        firsts[known] = seen(run_of(first, pools, folder, last_step), case.sees)
    run = run_of(second, pools, folder, last_step)
    one, two = firsts[known], seen(run, case.sees)
    assert one != two
    assert case.words in two
    assert not case.words or case.words not in one
    if case.sees in ("schedule", "passed", "unbucketed"):
        assert seen(run, "audit").startswith("passed\n")


def run_of(plan: Plan, pools: Pools, folder: Path, last_step: LastStep) -> PlanRun:
    settings = RunSettings(Path(__file__).parent, folder / "golden", folder / "artifacts")
    return PlanRun(plan, settings, pools, last_step=last_step)


def seen(run: PlanRun, what: str) -> str:
    """What a person can see of a plan, the row's own name left out."""
    if what == "items":
        return " ".join(item_names(run.plan)).replace(f"[{run.plan.matrix_id}]", "")
    if what == "unbucketed":
        with run._its_code():
            return digest(run._mesh_world.unbucketed(0, "joint"))
    if what == "passed":
        with run._its_code():
            return run._mesh_world.passed(0)["joint"].digest
    if what == "schedule":
        with run._its_code():
            world = run._mesh_world
            return "\n".join(text_of(world, 0, "").splitlines()[1:])
    try:
        verdict = run.check(what)
    except FxbucketError as error:
        return str(error)
    return "\n".join([verdict.outcome, verdict.summary, *verdict.lines])
