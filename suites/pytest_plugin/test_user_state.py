"""What a plan's code leaves in pytest's process: nothing of it may reach another plan, nor end or skip anything."""

from __future__ import annotations

import contextlib
import logging
import random
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy.random
import pytest
import torch

from pytest_fxbucket.errors import FxbucketError
from pytest_fxbucket.plan.load import load_plans
from pytest_fxbucket.process.state import ProcessState, torch_settings_now, umask
from pytest_fxbucket.ranks.pools import Pools
from pytest_fxbucket.run import PlanRun
from pytest_fxbucket.settings import RunSettings
from pytest_fxbucket.step.portable import digest, encode_module
from suites.pytest_plugin.conftest import MODEL, PLAN

HEAD = "import os, random, signal, sys, warnings\nimport numpy, pytest, torch\nimport tiny\nfrom tiny import batch, loss\n\n"
# What a factory may leave: the step is then traced to its end, or it cannot be.
LEAVES = {
    "its step is traced": (
        "torch.set_default_device('cpu')",
        "torch.use_deterministic_algorithms(True)",
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.cuda.enable_flash_sdp(False)",
        "torch.set_autocast_dtype('cpu', torch.float16)",
        "torch.set_num_threads(torch.get_num_threads() + 3)",
        "torch.__future__.set_swap_module_params_on_conversion(True)",
        "torch.nn.modules.module.register_module_forward_hook(lambda module, given, made: made * 2)",
        "torch.manual_seed(9)",
        "random.seed(9)",
        "numpy.random.seed(9)",
        "os.environ['LEFT'] = '1'",
        "os.environ.pop('HOME', None)",
        "os.chdir('/')",
        "sys.path.insert(0, '/nowhere')",
        "sys.setrecursionlimit(12345)",
        "os.umask(0o077)",
        "sys.stdout = sys.stderr = open(os.devnull, 'w')",
        "sys.excepthook = print",
        "signal.signal(signal.SIGALRM, signal.SIG_DFL)",
        "signal.setitimer(signal.ITIMER_REAL, 1000)",
    ),
    "its step cannot be traced": (
        "torch.set_autocast_enabled('cpu', True)",
        "torch.autograd.set_detect_anomaly(True)",
        "torch.set_default_dtype(torch.float64)",
        "torch.set_grad_enabled(False)",
        "torch.set_default_device('meta')",
        "warnings.simplefilter('error')",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plans of the model `tiny`; no module of theirs stays behind."""
    (tmp_path / "tiny.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "leaver", "sets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


Traced = tuple[str, list[object]]
"""Digest of a step's graph, and the dtypes of what goes in."""
_clean: list[Traced] = []


@pytest.fixture
def clean(folder: Path) -> Traced:
    """The step of `tiny` before anything was left, traced once."""
    if not _clean:
        _clean.append(traced(run_of(folder)))
    return _clean[0]


def run_of(folder: Path, module: str = "tiny", name: str = "plan") -> PlanRun:
    path = folder / f"{name}.toml"
    path.write_text(PLAN.replace("tiny:", f"{module}:"))
    settings = RunSettings(rootdir=folder, golden_dir=folder / "golden", artifacts=folder / ".fxbucket")
    return PlanRun(load_plans(path)[0], settings, Pools())


def traced(run: PlanRun) -> Traced:
    step = run.step
    return digest(encode_module(step.graphs["joint"])), [value.dtype for value in step.inputs["joint"]]


def everything() -> list[object]:
    """All that code may leave, as it is now, in what compares by value."""
    state = ProcessState.take()
    assert state.generators is not None
    generators = [generator.tolist() for generator in state.generators]
    numbers = [part.tolist() if hasattr(part, "tolist") else part for part in state.numpy_random]
    files = [state.cwd, state.environ, state.path, state.excepthook, sys.stdin, sys.stdout, sys.stderr]
    limits = [sys.getrecursionlimit(), umask(), torch.get_num_threads(), list(warnings.filters)]
    alarm = [signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0]
    return [torch_settings_now(), generators, state.python_random, numbers, files, limits, alarm]


def test_who_imports_numpy_has_drawn_nothing_yet() -> None:
    before = ProcessState.take()
    assert not replace(before, numpy_random=None).has_drawn()
    numpy.random.random()
    assert before.has_drawn()


@pytest.mark.parametrize("kind", LEAVES)
def test_what_a_factory_leaves_changes_no_other_plan_and_nothing_in_the_process(folder: Path, kind: str, clean: Traced) -> None:
    lines = ["made = tiny.build()", *LEAVES[kind], "return made"]
    (folder / "leaver.py").write_text(HEAD + "def build():\n" + "".join(f"    {line}\n" for line in lines))
    random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
    before = everything()
    fails = contextlib.nullcontext() if kind == "its step is traced" else pytest.raises(FxbucketError)
    with fails:
        traced(run_of(folder, "leaver", "leaves"))
    assert everything() == before
    assert traced(run_of(folder, name="again")) == clean


def test_a_plan_is_traced_alike_whatever_a_conftest_has_set(folder: Path, clean: Traced) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert traced(run_of(folder, name="again")) == clean
        assert torch.get_default_dtype() == torch.float64, "the conftest's own tests keep what it set"
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_a_module_sets_when_it_is_imported_holds_for_each_plan_that_names_it(folder: Path) -> None:
    """It is imported once, and state is put back: a second plan, or a second mesh, would be traced otherwise."""
    lines = "torch.set_default_dtype(torch.float64)\nos.environ['OF_SETS'] = 'here'\n"
    build = "def build():\n    assert os.environ['OF_SETS']\n    return tiny.build()\n"
    own = "def batch(rank, step):\n    return (torch.ones(3, 8) * (1 + rank + step),)\n"
    (folder / "sets.py").write_text(HEAD + lines + build + own)
    first, second = traced(run_of(folder, "sets", "a")), traced(run_of(folder, "sets", "b"))
    assert torch.float64 in first[1]
    assert first == second
    assert traced(run_of(folder, name="after"))[1][0] == torch.float32


def test_what_a_module_sets_holds_for_each_plan_whose_module_imports_it(folder: Path) -> None:
    (folder / "shared_sets.py").write_text(
        "import os, torch\ntorch.set_default_dtype(torch.float64)\nos.environ['OF_SHARED'] = 'here'\n"
    )
    build = "def build():\n    assert os.environ['OF_SHARED']\n    return tiny.build()\n"
    own = "def batch(rank, step):\n    return (torch.ones(3, 8) * (1 + rank + step),)\n"
    for name in ("one", "other"):
        (folder / f"{name}_imports.py").write_text(f"import shared_sets\n{HEAD}{build}{own}")
    first, second = (traced(run_of(folder, f"{name}_imports", name)) for name in ("one", "other"))
    assert torch.float64 in first[1]
    assert first == second
    assert traced(run_of(folder, name="after"))[1][0] == torch.float32


ENDS = {
    "sys.exit(0)": "SystemExit: 0",
    "os._exit(0)": "HardExit: os._exit(0)",
    "pytest.skip('not here')": "Skipped: not here",
    "pytest.xfail('known')": "XFailed: known",
    "pytest.exit('enough', returncode=0)": "Exit: enough",
    "raise Mute": "Mute: no text, since its __str__ raised ValueError",
}
MUTE = "class Mute(Exception):\n    def __str__(self):\n        raise ValueError('mute')\n\n"
PLACES = {
    "import": "{ends}\n",
    "factory": "def build():\n    {ends}\n",
    "batch": "def batch(rank, step):\n    {ends}\nbuild = tiny.build\n",
    "loss": "def loss(output, batch):\n    {ends}\nbuild = tiny.build\n",
}


@pytest.mark.parametrize(
    ("place", "ends"),
    [*(("factory", ends) for ends in ENDS), *((place, "sys.exit(0)") for place in PLACES if place != "factory")],
)
def test_code_that_ends_or_skips_is_an_error_that_names_it(folder: Path, place: str, ends: str) -> None:
    (folder / "leaver.py").write_text(HEAD + MUTE + PLACES[place].format(ends=ends))
    with pytest.raises(FxbucketError) as caught:
        run_of(folder, "leaver").check("audit")
    assert ENDS[ends] in str(caught.value)
    assert "leaver" in str(caught.value)


@pytest.mark.parametrize(
    ("table", "ends"),
    [("optimizer", "sys.exit(0)"), ("transform", "pytest.skip('not here')"), ("mode", "sys.exit(0)"), ("pass", "sys.exit(0)")],
)
def test_passes_modes_optimizers_and_transformations_that_end_or_skip_are_errors_too(
    folder: Path, table: str, ends: str
) -> None:
    lines = f"def it(*args, **kwargs):\n    {ends}\nbuild = tiny.build\n"
    (folder / "leaver.py").write_text(HEAD + lines)
    run = run_of(folder, "leaver")
    text = run.plan.path.read_text()
    text += {"optimizer": '[optimizer]\nfactory = "leaver:it"\n', "transform": '[[transform]]\nname = "leaver:it"\n'}.get(
        table, ""
    )
    if table == "mode":
        text = text.replace("[parallel]\n", '[parallel]\nmode = "leaver:it"\n')
    run.plan.path.write_text(text)
    settings = RunSettings(folder, folder / "golden", folder / ".fxbucket", "leaver:it" if table == "pass" else "manual")
    with pytest.raises(
        FxbucketError, match=r"leaver(:it)? .*(SystemExit: 0|Skipped: not here|raised SystemExit|raised Skipped)"
    ):
        PlanRun(load_plans(run.plan.path)[0], settings, Pools()).check("audit")


@pytest.mark.usefixtures("warm")
def test_a_factory_that_skips_fails_its_items_and_no_others(project: pytest.Pytester) -> None:
    Path("leaver.py").write_text(HEAD + "def build():\n    pytest.skip('not on this machine')\n")
    Path("plans/leaves.toml").write_text(
        PLAN.replace("tiny:build", "leaver:build")
        + "\n[checks]\nsame = false\nbitwise = false\neager = false\ngolden = false\n"
    )
    Path("plans/good.toml").write_text(PLAN + "\n[checks]\nsame = false\nbitwise = false\neager = false\ngolden = false\n")
    result = project.runpytest_subprocess("plans/leaves.toml", "plans/good.toml")
    result.assert_outcomes(failed=2, passed=2)
    result.stdout.fnmatch_lines(
        ["*[[]model[]] factory leaver:build failed at leaver.py:* in build: Skipped: not on this machine"]
    )


def test_a_graph_factory_that_compiles_does_not_flood_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where torch was imported before, pytest hears all that torch says of its compiler, thousands of lines."""
    lines = (
        "def step():\n    torch.compile(lambda x: x + 1, backend='aot_eager')(torch.ones(2))\n    raise ValueError('later')\n"
    )
    (folder / "leaver.py").write_text(HEAD + lines)
    path = folder / "graph.toml"
    path.write_text('[graph]\nfactory = "leaver:step"\n[parallel]\ndp_shard = 2\n[bucket]\nplan = ["a"]\n')
    run = PlanRun(load_plans(path)[0], RunSettings(folder, folder / "golden", folder / ".fxbucket"), Pools())
    heard = logging.getLogger("torch.__trace")
    heard.addHandler(caplog.handler)  # as pytest does with loggers that do not propagate
    try:
        with pytest.raises(FxbucketError, match="ValueError: later"):
            run.check("collectives")
    finally:
        heard.removeHandler(caplog.handler)
    assert [record.getMessage() for record in caplog.records if record.levelno < logging.WARNING] == []
