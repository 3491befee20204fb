"""``fxbucket init --torchtitan``: from a name in torchtitan's registry to files that pytest runs, from an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from pytest_fxbucket.cli.__main__ import main
from pytest_fxbucket.cli.torchtitan import registry
from suites.warm.runs import WarmRuns
from suites.zoo.libraries import FOLDER
from suites.zoo.visit import ROOT

Capsys = pytest.CaptureFixture[str]
installed = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the libraries of the zoo are not installed: make zoo, or make suites, installs them"
)
GRAPH = """
[graph]
factory = "titan_llama3:traced"
[parallel]
dp_shard = 2
param_dtype = "bfloat16"
reduce_dtype = "float32"
reshard_after_forward = false
[bucket]
plan = ["tok_embeddings", "layers.*", "norm+output"]
"""

MODULE = """
import torch
import titan_llama3 as titan
from torch.nn import functional as F


def test_batches_are_tokens_and_the_next_and_the_loss_is_their_mean():
    given, others = titan.batch(1, 2), (titan.batch(0, 2), titan.batch(1, 1))
    tokens, labels = given["tokens"], given["labels"]
    assert tokens.shape == labels.shape == (2, 32)
    assert tokens[:, 1:].equal(labels[:, :-1])
    assert not any(tokens.equal(other["tokens"]) for other in others)
    output = torch.randn(2, 32, int(max(tokens.max(), labels.max())) + 1)
    torch.testing.assert_close(titan.loss(output, given), F.cross_entropy(output.flatten(0, 1), labels.flatten()))
"""
"""Of a user: what items cannot tell, since plan and trainer have the same batches and loss."""


def run(warm_runs: WarmRuns, words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{FOLDER}", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return warm_runs.run(["-m", *words], folder, environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, warm_runs: WarmRuns) -> Path:
    """What init made of Llama 3; its words are in ``said.txt``."""
    found = tmp_path_factory.mktemp("titan")
    ran = run(warm_runs, ["pytest_fxbucket.cli", "init", "--torchtitan", "llama3", "--flavor", "debugmodel"], found)
    assert ran.returncode == 0, ran.stderr
    (found / "said.txt").write_text(ran.stdout)
    return found


@installed
def test_the_plan_says_what_torchtitans_defaults_do(folder: Path) -> None:
    plan = (folder / "titan_llama3.toml").read_text()
    for line in (
        'param_dtype = "bfloat16"',
        'reduce_dtype = "float32"',
        "clip_norm = 1.0",
        'checkpoint = ["layers.1", "layers.3", "layers.5"]',
        "args = { lr = 0.0008, betas = [0.9, 0.95], eps = 1e-08, weight_decay = 0.1, fused = true }",
        'plan = [\n  "tok_embeddings",\n  "norm+output",\n  "layers.*",\n]',
        'factory = "titan_llama3:Trainer"',
    ):
        assert line in plan
    assert "tok_embeddings, norm+output, layers.*, torchtitan's own buckets" in (folder / "said.txt").read_text()


@installed
def test_its_items_pass_beside_torchtitans_trainer_and_so_do_the_toolkits_graph_and_passes(
    folder: Path, warm_runs: WarmRuns
) -> None:
    """With two of its layers, which is cheaper."""
    module, plan = folder / "titan_llama3.py", folder / "titan_llama3.toml"
    shallow = 'FLAVOR = "debugmodel"\nSPEC.model_args[FLAVOR].n_layers = 2\n'
    module.write_text(module.read_text().replace('FLAVOR = "debugmodel"\n', shallow))
    plan.write_text(plan.read_text().replace('["layers.1", "layers.3", "layers.5"]', '["layers.1"]'))
    (folder / "graph.toml").write_text(GRAPH)
    (folder / "test_module.py").write_text(MODULE)
    (folder / "by_torchtitan.toml").write_text(GRAPH + '[pass]\nof = ["titan_llama3:passes"]\n[checks]\naudit = false\n')
    ran = run(warm_runs, ["pytest", "-p", "no:xdist", "--fxbucket-plans=.", "--accept"], folder)
    assert ran.returncode == 0, ran.stdout
    passed = re.findall(r"^(\w+)\.toml: (.*?) launches, .*?; ((?:\w+(?:@2)? passed(?:, |$))+)", ran.stdout, re.MULTILINE)
    all_but_eager = "audit passed, golden passed, collectives passed, same passed, bitwise passed, "
    assert {plan: (launches, items) for plan, launches, items in passed} == {
        "titan_llama3": (
            "61 → 11",
            "audit passed, golden passed, collectives passed, same passed, bitwise@2 passed, eager@2 passed",
        ),
        "graph": ("42 → 8", all_but_eager),
        "by_torchtitan": ("42 → 8", all_but_eager.removeprefix("audit passed, ")),
    }, ran.stdout


EXPERTS = """
import torch
from pytest_fxbucket.cli.__main__ import main

histc = torch.histc
assert main(["init", "--torchtitan", "llama4"]) == 0
assert torch.histc is histc
"""


@installed
def test_experts_take_a_step_where_there_is_no_gpu_and_nothing_of_torchs_is_replaced(
    tmp_path: Path, warm_runs: WarmRuns
) -> None:
    """init makes a step of it on this machine, and looks at what the pass makes of the plan."""
    (tmp_path / "asked.py").write_text(EXPERTS)
    ran = run(warm_runs, ["asked"], tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr


ASKED = """
from pytest_fxbucket.cli.__main__ import main
for words in (["lama3"], ["llama3", "--flavor", "9B"], ["llama3", "--flavor", "8B_flex"], ["vlm"]):
    assert main(["init", "--torchtitan", *words]) == 1
"""


@installed
def test_what_torchtitan_does_not_have_is_one_sentence_and_writes_nothing(tmp_path: Path, warm_runs: WarmRuns) -> None:
    (tmp_path / "asked.py").write_text(ASKED)
    ran = run(warm_runs, ["asked"], tmp_path)
    assert ran.returncode == 0, ran.stderr
    name, flavor, attention, inputs = [line for line in ran.stderr.splitlines() if line.startswith("fxbucket: ")]
    assert 'torchtitan 0.2.2 has no model "lama3"; did you mean "llama3"?; it has autoparallel.deepseek_v3, ' in name
    assert 'torchtitan\'s llama3 has no "9B"; did you mean "8B"?; it has debugmodel, ' in flavor
    assert 'its attention is "flex", whose masks are made outside of the model; flavors of llama3 with plain' in attention
    assert "Llama3Siglip2Transformer takes pixel_values, grid_thw, special_tokens and not tokens alone; write" in inputs
    assert [path.name for path in tmp_path.iterdir()] == ["asked.py"]


@pytest.mark.parametrize(
    ("found", "arguments", "says"),
    [
        (None, [], "--torchtitan needs torchtitan, which is not installed; pip install 'pytest-fxbucket[torchtitan]'"),
        ("0.3.0", [], "--torchtitan reads the registry of torchtitan 0.2.2, and 0.3.0 is installed"),
        ("0.2.2", ["--hf", "."], "--hf and --torchtitan are of two models"),
        ("0.2.2", ["--arg", "a=1"], "--torchtitan writes the factory itself"),
        ("0.2.2", ["--out", "a-b.toml"], '"a-b" is no name for a Python module'),
    ],
)
def test_what_init_cannot_do_is_said_before_torchtitan_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys, found: str | None, arguments: list[str], says: str
) -> None:
    def version(name: str) -> str:
        if found is None:
            raise registry.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(registry, "version", version)
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--torchtitan", "llama3", *arguments]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
