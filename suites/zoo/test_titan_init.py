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
from suites.zoo.installed import installed
from suites.zoo.libraries import FOLDER
from suites.zoo.visit import ROOT

Capsys = pytest.CaptureFixture[str]
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
BY_OURS = """
[checks]
golden = false
collectives = false
bitwise = false
"""
BY_TORCHTITANS = """
[pass]
of = ["titan_llama3:passes"]
[checks]
audit = false
golden = false
collectives = false
"""
SHALLOW = "SPEC.model_args[FLAVOR].n_layers = 2\n"
"""With two of its layers, which is cheaper."""
INIT = """
import os

import torch

from pytest_fxbucket.cli.__main__ import main

histc = torch.histc
for words in (["lama3"], ["llama3", "--flavor", "9B"], ["llama3", "--flavor", "8B_flex"], ["vlm"]):
    assert main(["init", "--torchtitan", *words]) == 1
assert os.listdir() == ["asked.py"]

from torchtitan.protocols.train_spec import get_train_spec

for name in ("llama3", "llama4"):
    SPEC, FLAVOR = get_train_spec(name), "debugmodel"
    SHALLOW
    assert main(["init", "--torchtitan", name]) == 0
assert torch.histc is histc
""".replace("SHALLOW", SHALLOW)
"""Of experts init makes a step where there is no GPU, and looks at what the pass makes of the plan."""

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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("titan")


@pytest.fixture(scope="module")
def asked(folder: Path, warm_runs: WarmRuns) -> subprocess.CompletedProcess[str]:
    """What init said there, and made of Llama 3 and of experts."""
    (folder / "asked.py").write_text(INIT)
    ran = run(warm_runs, ["asked"], folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran


@installed
def test_the_plan_says_what_torchtitans_defaults_do(folder: Path, asked: subprocess.CompletedProcess[str]) -> None:
    plan = (folder / "titan_llama3.toml").read_text()
    for line in (
        'param_dtype = "bfloat16"',
        'reduce_dtype = "float32"',
        "clip_norm = 1.0",
        'checkpoint = ["layers.1"]',
        "args = { lr = 0.0008, betas = [0.9, 0.95], eps = 1e-08, weight_decay = 0.1, fused = true }",
        'plan = [\n  "tok_embeddings",\n  "norm+output",\n  "layers.*",\n]',
        'factory = "titan_llama3:Trainer"',
    ):
        assert line in plan
    assert "tok_embeddings, norm+output, layers.*, torchtitan's own buckets" in asked.stdout


@installed
def test_its_items_pass_beside_torchtitans_trainer_and_so_do_the_toolkits_graph_and_passes(
    folder: Path, asked: subprocess.CompletedProcess[str], warm_runs: WarmRuns
) -> None:
    module, flavor = folder / "titan_llama3.py", 'FLAVOR = "debugmodel"\n'
    module.write_text(module.read_text().replace(flavor, flavor + SHALLOW))
    (folder / "titan_llama4.toml").unlink()
    (folder / "graph.toml").write_text(GRAPH + BY_OURS)
    (folder / "test_module.py").write_text(MODULE)
    (folder / "by_torchtitan.toml").write_text(GRAPH + BY_TORCHTITANS)
    ran = run(warm_runs, ["pytest", "-p", "no:xdist", "--fxbucket-plans=.", "--accept", "--fxbucket-backend=local"], folder)
    assert ran.returncode == 0, ran.stdout
    passed = re.findall(r"^(\w+)\.toml: (.*?) launches, .*?; ((?:\w+(?:@2)? passed(?:, |$))+)", ran.stdout, re.MULTILINE)
    assert {plan: (launches, items) for plan, launches, items in passed} == {
        "titan_llama3": (
            "61 → 11",
            "audit passed, golden passed, collectives passed, same passed, bitwise@2 passed, eager@2 passed",
        ),
        "graph": ("42 → 8", "audit passed, same passed, "),
        "by_torchtitan": ("42 → 8", "same passed, bitwise passed, "),
    }, ran.stdout


@installed
def test_what_torchtitan_does_not_have_is_one_sentence_and_writes_nothing(asked: subprocess.CompletedProcess[str]) -> None:
    name, flavor, attention, inputs = [line for line in asked.stderr.splitlines() if line.startswith("fxbucket: ")]
    assert 'torchtitan 0.2.2 has no model "lama3"; did you mean "llama3"?; it has autoparallel.deepseek_v3, ' in name
    assert 'torchtitan\'s llama3 has no "9B"; did you mean "8B"?; it has debugmodel, ' in flavor
    assert 'its attention is "flex", whose masks are made outside of the model; flavors of llama3 with plain' in attention
    assert "Llama3Siglip2Transformer takes pixel_values, grid_thw, special_tokens and not tokens alone; write" in inputs


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
