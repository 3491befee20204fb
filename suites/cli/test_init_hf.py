"""``fxbucket init --hf``: from a configuration to files that pytest runs, from an empty folder."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_fxbucket.cli.__main__ import main
from pytest_fxbucket.cli.first_plan import PlanProblem
from pytest_fxbucket.cli.hugging_face.trial import around_blocks, way_out
from pytest_fxbucket.plan import Plan, load_plans
from suites.docs.blocks import ROOT
from suites.warm.runs import WarmRuns

pytest.importorskip("transformers", reason="fxbucket init --hf needs the extra models")

Capsys = pytest.CaptureFixture[str]
TEXT = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, vocab_size=1000
)
CONFIGS: dict[str, dict[str, Any]] = {
    "tied_mixtral": dict(
        model_type="mixtral",
        architectures=["MixtralForCausalLM"],
        tie_word_embeddings=True,
        dtype="bfloat16",
        eos_token_id=999,
        num_local_experts=16,
        num_experts_per_tok=4,
        **TEXT,
    ),
    "vit": dict(
        model_type="vit",
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=64,
        patch_size=8,
    ),
    "whisper": dict(
        model_type="whisper",
        d_model=128,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        vocab_size=1000,
        max_source_positions=100,
        max_target_positions=64,
        pad_token_id=998,
        bos_token_id=998,
        eos_token_id=998,
        decoder_start_token_id=999,
        encoder_layerdrop=0.1,
    ),
}
DETR = dict(
    model_type="detr",
    architectures=["DetrForObjectDetection"],
    use_timm_backbone=False,
    backbone=None,
    backbone_config=dict(
        model_type="resnet", embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=["stage4"]
    ),
    **{
        f"{part}_{of}": size
        for part in ("encoder", "decoder")
        for of, size in [("layers", 1), ("attention_heads", 2), ("ffn_dim", 32)]
    },
    d_model=32,
    num_queries=5,
    num_labels=3,
)
LINKED = "linked"
"""A folder that one of the plans is written to: a link that leads to a deeper one."""
GRID = dict(
    model_type="qwen2_vl",
    image_token_id=990,
    text_config=dict(
        model_type="qwen2_vl_text", rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[4, 6, 6]), **TEXT
    ),
    vision_config=dict(
        model_type="qwen2_vl_vision", depth=3, embed_dim=160, hidden_size=256, num_heads=2, mlp_ratio=2, patch_size=8
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all configurations and what init made of them; its words are in ``NAME.txt``."""
    found = tmp_path_factory.mktemp("hf")
    with pytest.MonkeyPatch.context() as patch, found.joinpath("stdout.txt").open("w") as said:
        patch.chdir(found)
        patch.setattr("sys.stdout", said)
        Path("elsewhere/plans").mkdir(parents=True)
        Path(LINKED).symlink_to("elsewhere/plans")
        for name, values in CONFIGS.items():
            Path(f"{name}.json").write_text(json.dumps(values))
            assert main(["init", "--hf", f"{name}.json", "--out", out(name)]) == 0
    return found


def out(name: str) -> str:
    return f"{LINKED}/{name}.toml" if name == "vit" else f"{name}.toml"


def rows(folder: Path, name: str) -> tuple[Plan, Plan]:
    """The plan of the real size, and that of the small one."""
    real, small = load_plans(folder / out(name))
    return real, small


def small_size(folder: Path, name: str) -> dict[str, Any]:
    """SMALL of the module."""
    tree = ast.parse((folder / out(name)).with_suffix(".py").read_text())
    found = next(
        one
        for one in tree.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.target.id == "SMALL"
    )
    assert found.value is not None
    value: dict[str, Any] = ast.literal_eval(found.value)
    return value


def test_what_init_wrote_passes_when_its_goldens_are_accepted(folder: Path, warm_runs: WarmRuns) -> None:
    """Init has tried audit and collectives of each model, ``suites.zoo.hf_init`` runs all items."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    ran = warm_runs.run(["-m", "pytest", "-p", "no:xdist", "tied_mixtral.toml", "--accept"], folder, environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    passed = re.findall(r"^([\w.\[\]]+): .*?((?:\w+(?:@2)? passed(?:, |$))+)", ran.stdout, re.MULTILINE)
    assert dict(passed) == {
        "tied_mixtral.toml": "audit passed, golden passed, collectives passed, same passed",
        "tied_mixtral.toml[small]": "bitwise@2 passed, eager@2 passed",
    }


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("tied_mixtral", ["model.embed_tokens+model.norm", "model.layers.*"]),
        ("vit", ["vit.embeddings", "vit.layers.*", "vit.layernorm+classifier"]),
    ],
)
def test_entries_are_the_models_own_blocks_and_one_list_serves_both_sizes(folder: Path, name: str, entries: list[str]) -> None:
    real, small = rows(folder, name)
    text = (folder / out(name)).read_text()
    assert [entry for entry in entries if f'"{entry}"' not in text] == []
    assert real.bucket.plan == small.bucket.plan
    assert small.model is not None
    assert small.model.args == {"small": True}


def test_a_module_in_a_linked_folder_finds_its_configuration(folder: Path) -> None:
    (found,) = re.findall(r'CONFIG = Path\(__file__\).parent / "(.*)"', (folder / LINKED / "vit.py").read_text())
    assert json.loads((folder / LINKED / found).read_text()) == CONFIGS["vit"]


def test_the_real_size_is_in_the_plan_alone_and_the_dtype_is_the_configurations(folder: Path) -> None:
    real, small = rows(folder, "tied_mixtral")
    assert (real.parallel.dp_shard, real.parallel.param_dtype, real.parallel.reduce_dtype) == (8, "bfloat16", "float32")
    assert (real.checks.audit, bool(real.checks.golden), real.checks.bitwise) == (True, True, False)
    assert (small.run_degrees, small.checks.bitwise) == ({**small.run_degrees, "dp_shard": 2}, True)
    assert "# lm_head.weight is tied to model.embed_tokens.weight" in (folder / "tied_mixtral.toml").read_text()
    said = (folder / "stdout.txt").read_text()
    assert "lm_head.weight is tied to model.embed_tokens.weight: one parameter, in one entry" in said


def test_small_sizes_are_written_for_people_to_change(folder: Path) -> None:
    assert small_size(folder, "tied_mixtral") == {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 256,
        "eos_token_id": 255,
    }


def test_layers_that_are_dropped_at_random_stay_and_it_is_said(folder: Path) -> None:
    assert '"encoder_layerdrop": 0.0' in (folder / "whisper.py").read_text()


def test_reasons_for_which_torch_rounds_otherwise_are_stated(folder: Path) -> None:
    """Each layer of the decoder reads the encoder's output for its keys and its values; eager is on."""
    _, small = rows(folder, "whisper")
    assert (small.eager.rounds_otherwise, small.checks.eager) == (("shared_input",), True)
    assert "eager goes the graph's way in shared_input" in (folder / "stdout.txt").read_text()


def test_a_model_with_a_layer_that_looks_at_values_runs_as_init_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys, warm_runs: WarmRuns
) -> None:
    """The layer is overridden; it is given a flattened image, column by column, and would drop some of it at random."""
    monkeypatch.chdir(tmp_path)
    Path("detr.json").write_text(json.dumps(DETR))
    assert main(["init", "--hf", "detr.json", "--out", "detr.toml"]) == 0
    said = capsys.readouterr().out
    assert "Not traced, since they look at values: model.encoder.layers.0; [override] calls them as they are." in said
    assert "Dropout is 0, by ALWAYS of detr.py" in said
    assert 'ALWAYS: dict[str, Any] = {"dropout": 0.0}' in Path("detr.py").read_text()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_XDIST_WORKER", None)
    ran = warm_runs.run(["-m", "pytest", "-p", "no:xdist", "detr.toml", "-k", "bitwise"], tmp_path, environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "detr.toml[small]: bitwise@2 passed" in ran.stdout


def test_a_model_that_cannot_be_traced_is_told_with_module_and_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(GRID))
    assert main(["init", "--hf", "."]) == 1
    (said,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("It does not pass yet"))
    assert re.sub(r":\d+ in", ":LINE in", said) == (
        "It does not pass yet, in the small size: tracing module model.visual failed at transformers/vision_utils.py:LINE in "
        "get_vision_position_ids: it asks for the value of a tensor (item(), bool(), tolist(), numpy()), which does not exist "
        "while tracing; keep it a tensor (torch.where instead of if), or leave it out of the step; "
        "an override of model.visual would leave nothing of its blocks to bucket. "
        "The sizes of its images are values (image_grid_thw): leave the images out of draw() of hf_qwen2_vl.py, and the text "
        "is traced."
    )
    assert load_plans(Path("hf_qwen2_vl.toml"))


def test_a_module_around_blocks_is_not_told_to_be_overridden() -> None:
    """As the encoders of LED and Longformer, which ask whether any token attends to all."""
    problem = around_blocks(PlanProblem('it asks; [[override]] module = ["encoder"] calls it as it is', "encoder", True))
    assert problem.sentence == "it asks; an override of encoder would leave nothing of its blocks to bucket"
    out = way_out(_trial(problem, "encoder.layer.0+encoder.layer.1"))
    assert out == " Let build() of a.py make a constant of what it looks at, or give the blocks alone."


def _trial(problem: PlanProblem, *entries: str) -> Any:
    written = SimpleNamespace(path=Path("a.py"), fed=SimpleNamespace(lines=()))
    return SimpleNamespace(written=written, plan=SimpleNamespace(bucket=SimpleNamespace(entries=entries)), problem=problem)


@pytest.mark.parametrize(
    ("module", "looks_at_values", "says"),
    [
        ("model.layers.1.self_attn", True, ' Attention was "eager" here: attn_implementation = "sdpa" in build() of a.py'),
        ("model.layers.1.mlp.experts", True, ' Experts are chosen by values here: experts_implementation = "batched_mm"'),
        ("model.layers.1.mlp.experts", False, ""),
        ("model.layers.1.norm", True, ""),
    ],
)
def test_the_way_out_is_of_the_module_that_is_in_the_way(module: str, looks_at_values: bool, says: str) -> None:
    found = way_out(_trial(PlanProblem("it asks for a value", module, looks_at_values), "model.layers.1"))
    assert found.startswith(says)
    assert bool(found) == bool(says)


@pytest.mark.parametrize(
    ("written", "arguments", "status", "says"),
    [
        (None, ["--hf", "config.json"], 2, "--hf config.json cannot be read: No such file or directory"),
        ("{", ["--hf", "config.json"], 2, "--hf config.json is no JSON"),
        ("[]", ["--hf", "config.json"], 2, "--hf config.json is a JSON list, where an object with a model_type was expected"),
        ("{}", ["--hf", "."], 2, '--hf config.json has no "model_type"'),
        ('{"model_type": "lama"}', ["--hf", "."], 1, 'has no model_type "lama"; the nearest that it has is "'),
        ('{"model_type": "x", "auto_map": {}}', ["--hf", "."], 1, "its code is elsewhere (auto_map)"),
        (
            '{"model_type": "llama", "architectures": ["LlamaForCausal"]}',
            ["--hf", "."],
            1,
            'the nearest that it has is "LlamaForCausalLM"',
        ),
        ('{"model_type": "llama"}', ["--hf", ".", "--out", "a-b.toml"], 2, '"a-b" is no name for a Python module'),
        ('{"model_type": "llama"}', ["--hf", ".", "--arg", "a=1"], 2, "--hf writes the factory itself"),
        (
            '{"model_type": "llama", "num_attention_heads": 3, "hidden_size": 64}',
            ["--hf", "."],
            1,
            "config.json: LlamaConfig does not take it",
        ),
        (
            '{"model_type": "llama", "hidden_act": "sili"}',
            ["--hf", "."],
            1,
            "LlamaForCausalLM makes no step of a small configuration of config.json: KeyError",
        ),
        (
            '{"model_type": "beit", "architectures": ["BeitForMaskedImageModeling"], "image_size": [32, 32], "patch_size": 8}',
            ["--hf", "."],
            1,
            "BeitForMaskedImageModeling makes no step of a small configuration of config.json: ",
        ),
        (
            '{"model_type": "higgs_audio_v2_tokenizer"}',
            ["--hf", "."],
            1,
            "config.json: HiggsAudioV2TokenizerModel needs torchaudio, which cannot be imported",
        ),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_writes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capsys,
    written: str | None,
    arguments: list[str],
    status: int,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if written is not None:
        Path("config.json").write_text(written)
    assert main(["init", *arguments]) == status
    assert says in capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} <= {"config.json"}


@pytest.mark.parametrize(
    ("named", "what"),
    [({"architectures": ["VitDetModel"]}, '"VitDetModel"'), ({}, "its model for VitDetConfig")],
    ids=["named", "found"],
)
def test_a_class_that_transformers_cannot_import_is_one_sentence(
    named: dict[str, Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps({"model_type": "vitdet", **named}))
    monkeypatch.setitem(sys.modules, "transformers.models.vitdet.modeling_vitdet", None)
    assert main(["init", "--hf", "."]) == 1
    assert f"config.json: transformers cannot import {what}: " in capsys.readouterr().err


def test_a_module_that_is_there_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text('{"model_type": "llama"}')
    Path("hf_llama.py").write_text("mine")
    assert main(["init", "--hf", "."]) == 2
    assert Path("hf_llama.py").read_text() == "mine"
    assert not Path("hf_llama.toml").exists()
    assert "hf_llama.py is already there and is left as it is" in capsys.readouterr().err
