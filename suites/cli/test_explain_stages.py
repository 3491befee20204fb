"""``fxbucket explain`` of a plan with pipeline stages: how they run, and the graphs of every stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_fxbucket.cli.__main__ import main

PLAN = """
[model]
factory = "suites.cli.staged_nets:build"
batch = "suites.cli.staged_nets:batch"
[parallel]
pp = 2
dp_shard = 2
[pipeline]
cuts = ["layers.1"]
schedule = "1F1B"
[step]
microbatches = 2
[optimizer]
factory = "torch.optim:AdamW"
[bucket]
plan = ["embed+head", "layers.[0-3]"]
"""


@pytest.fixture
def explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "staged.toml").write_text(PLAN)
    assert main(["explain", "staged.toml"]) == 0
    return capsys.readouterr().out


def test_people_are_told_of_stages_and_of_the_graphs_of_each(explained: str) -> None:
    assert explained.startswith(
        "staged.toml: pass manual, 4 ranks\n2 stages on 2 ranks of pp by 1F1B, 2 microbatches; fxbucket"
    )
    assert "\nstage 0 forward graph: no launch\n" in explained
    for stage, entry in ((0, "layers.[0-1]"), (1, "layers.[2-3]")):
        graph = explained.partition(f"\nstage {stage} unshard graph: ")[2].partition(" graph: ")[0]
        assert entry in graph, f"stage {stage} gathers its own layers"
    updates = [line for line in explained.splitlines() if line.startswith("pp ") and " update graph" in line]
    assert [line.partition(":")[0] for line in updates] == ["pp 0 update graph", "pp 1 update graph"]
