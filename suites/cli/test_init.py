"""``fxbucket init``: a first plan that loads, plans every parameter once, and overwrites nothing."""

from __future__ import annotations

import importlib
import sys
import zlib
from pathlib import Path

import pytest

from pytest_fxbucket.cli import first_plan
from pytest_fxbucket.cli.__main__ import main
from pytest_fxbucket.cli.first_entries import BlockNames, Draft, draft
from pytest_fxbucket.cli.first_plan import PlanProblem, PlanSource, changed_until_right, plan_text, said_of, stages_draft
from pytest_fxbucket.plan import Plan, Resolution, load_plans, parse_entries, parse_plans, resolve
from pytest_fxbucket.plan.toml_text import from_toml, to_toml

Capsys = pytest.CaptureFixture[str]
MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.heads = nn.ModuleList([nn.Linear(dim, 1), nn.Linear(dim, 1)])

class Net(nn.Module):
    def __init__(self, layers, dim, tied):
        super().__init__()
        self.embed = nn.Embedding(16, dim)
        self.drop = nn.Dropout(0.0)
        self.layers = nn.ModuleList([Block(dim) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, 16, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, tokens, scale=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer.down(layer.up(x).relu()) + sum(head(x) for head in layer.heads)
        return self.out(self.norm(x)) if scale is None else self.out(self.norm(x)) * scale

def build(layers=4, dim=8, tied=False):
    return Net(layers, dim, tied)

def batch(rank, step):
    drawn = torch.randint(16, (2, 4, 5), generator=torch.Generator().manual_seed(1000 * step + rank))
    return drawn[0], drawn[1]

def loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())

class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else self.linear(-x)

def asks_for_values():
    model = build(layers=2, tied=True)
    for layer in model.layers:
        layer.up = nn.Sequential(Asks(), layer.up)
    return model

class ByName(Net):
    def __init__(self):
        super().__init__(2, 8, False)
        names = ["0", "1", "last"]
        self.layers = nn.ModuleDict({name: Block(8) for name in names})

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = x + layer.down(layer.up(x))
        return self.out(self.norm(x))

def by_name():
    return ByName()

def raises_in_forward():
    model = build(layers=1)
    model.norm = nn.LayerNorm(9)
    return model

def tied():
    return build(tied=True)

def mixed():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))

def shared():
    block = Block(4)
    return nn.ModuleDict({"layers": nn.ModuleList([block, Block(4), block]), "norm": nn.LayerNorm(4)})

def tied_into_block():
    model = build()
    model.layers[2].tied = model.embed
    return model

def head_tied_to_block():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model.head = nn.Linear(4, 4)
    model.head.weight = model.layers[1].weight
    return model

def loose():
    model = nn.Module()
    for number in range(9):
        model.register_parameter(f"w{number}", nn.Parameter(torch.ones(2)))
    return model

def empty():
    return nn.ReLU()

def text():
    return "no model"

def broken():
    raise KeyError("no such size")
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A model file in the current folder, under a module name of its own, since imports are remembered."""
    name = f"net_{zlib.crc32(request.node.nodeid.encode())}"
    (tmp_path / f"{name}.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return name


def load(path: str) -> Plan:
    (plan,) = load_plans(Path(path))
    return plan


def resolved(plan: Plan) -> Resolution:
    """Resolve a plan on the model that it names, built for real, as the audit does."""
    assert plan.model is not None
    module, _, factory = plan.model.factory.partition(":")
    names = BlockNames.of(getattr(sys.modules[module], factory)(**plan.model.args))
    found = resolve(plan.bucket.plan, names.names, names.modules, aliases=names.names, unplanned=plan.bucket.unplanned)
    planned = [fqn for entry in found.entries for fqn in entry.parameters]
    assert sorted(planned) == sorted(names.parameters), "every parameter is planned once"
    return found


@pytest.mark.parametrize(
    ("factory", "entries"),
    [
        ("mixed", ["2", "3", "0", "4"]),
        ("shared", ["layers.0+layers.2", "layers.1", "norm"]),
        ("by_name", ["embed", "layers.0", "layers.1", "layers.last", "norm+out"]),
        ("tied_into_block", ["layers.0", "layers.1", "layers.2", "layers.3", "norm+out"]),
        ("head_tied_to_block", ["layers.0", "layers.1", "head.bias"]),
        ("loose", ["root"]),
        ("tied", ["embed+norm", "layers.0", "layers.1", "layers.2", "layers.3"]),
    ],
)
def test_models_of_other_shapes_get_a_plan_that_holds_every_parameter_once(
    net: str, monkeypatch: pytest.MonkeyPatch, factory: str, entries: list[str]
) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    model = getattr(importlib.import_module(net), factory)()
    names, bucket = BlockNames.of(model), draft(model)
    parsed = parse_entries(list(bucket.entries), "plan")
    found = resolve(parsed, names.names, names.modules, aliases=names.names, unplanned=bucket.unplanned)
    assert sorted(entry.name for entry in found.entries) == sorted(entries)
    assert sorted(fqn for entry in found.entries for fqn in entry.parameters) == sorted(names.parameters)


def test_the_first_plan_passes_and_says_what_it_needed_for_that(net: str, capsys: Capsys) -> None:
    """``scale`` could take the labels: only with ``inputs`` the loss gets them. Tied weights are planned once."""
    assert main(["init", f"{net}:asks_for_values"]) == 0
    said, plan = capsys.readouterr().out, load(f"{net}.toml")
    assert plan.model is not None
    assert plan.model.inputs == ((0,),)
    assert [entry.name for one in plan.override for entry in one.module] == ["layers.*.up.0"]
    assert "The model is given the first item of a batch, and the loss the rest" in said
    assert "Not traced, since they look at values: layers.*.up.0; [override] calls them as they are." in said
    assert resolved(plan).entries[0].parameters[0] == "embed.weight"
    assert "out.weight is tied to embed.weight" in said


def test_why_torchs_own_step_rounds_otherwise_is_written_and_said(tmp_path: Path, capsys: Capsys) -> None:
    assert main(["init", "fixtures.models.t5:build", "--out", str(tmp_path / "t5.toml")]) == 0
    assert load(str(tmp_path / "t5.toml")).eager.rounds_otherwise == ("shared_input",)
    assert "eager goes the graph's way in shared_input, as [eager] rounds_otherwise says: a unit" in capsys.readouterr().out


def test_a_model_that_is_large_is_not_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(first_plan, "first_failure", lambda plan, checks, *_: asked.append(checks))
    source, bucket = PlanSource("m:build", {}, "m:batch", None), Draft(("root",), "root")
    for nbytes in (2**26, 2**26 + 1):
        assert first_plan.tried(source, bucket, Path("p.toml"), {}, nbytes, print) == first_plan.TriedPlan(source)
    assert asked == [("audit", "collectives", "eager"), ("audit", "collectives")]


@pytest.mark.parametrize("needed", [0, 8, 9])
def test_the_last_change_is_tried_too(needed: int) -> None:
    wrong = PlanProblem("it lacks changes")
    made, problem = changed_until_right(0, lambda made: None if made == needed else wrong, lambda made, _: made + 1)
    assert (made, problem) == (min(needed, 8), None if needed < 9 else wrong)


def test_what_keeps_the_first_plan_from_passing_is_said_and_the_plan_is_there(net: str, capsys: Capsys) -> None:
    assert main(["init", f"{net}:raises_in_forward", "--out", "p.toml"]) == 1
    assert "It does not pass yet: tracing module norm failed" in capsys.readouterr().out
    assert resolved(load("p.toml")).entries


def test_a_model_larger_than_memory_is_looked_at_without_it(net: str, tmp_path: Path, capsys: Capsys) -> None:
    huge = "def huge():\n    return nn.Sequential(*[nn.Linear(200_000, 200_000, bias=False) for _ in range(2)])\n"
    (tmp_path / f"{net}_huge.py").write_text(f"from torch import nn\n{huge}")
    assert main(["init", f"{net}_huge:huge"]) == 1, "there is no batch"
    assert "80,000,000,000   298.0 GiB" in capsys.readouterr().out


def test_the_tree_shows_equal_siblings_once_and_the_plan_has_an_entry_for_each_block(net: str, capsys: Capsys) -> None:
    assert main(["init", f"{net}:build", "--arg", "layers=3", "--out", "plans/a.toml"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[:12] == [
        "Net 1,166 4.6 KiB",
        "embed Embedding 128 512 B",
        "drop Dropout 0 0 B",
        "layers ModuleList 894 3.5 KiB",
        "[0-2] 3 x Block 298 1.2 KiB each",
        "up Linear 144 576 B",
        "down Linear 136 544 B",
        "heads ModuleList 18 72 B",
        "[0-1] 2 x Linear 9 36 B each",
        "norm LayerNorm 16 64 B",
        "out Linear 128 512 B",
        "",
    ]
    assert lines[-1] == "Next: pytest --fxbucket-plans=plans/a.toml"
    plan = load("plans/a.toml")
    assert plan.model is not None
    assert (plan.model.args, plan.model.batch, plan.model.loss) == ({"layers": 3}, f"{net}:batch", f"{net}:loss")
    assert [entry.name for entry in resolved(plan).entries] == ["embed", "layers.0", "layers.1", "layers.2", "norm+out"]
    assert '"layers.[0-2]"' in Path("plans/a.toml").read_text()


def test_a_batch_that_is_missing_gets_a_comment_and_is_said(tmp_path: Path, net: str, capsys: Capsys) -> None:
    bare = f"{net}_bare"
    (tmp_path / f"{bare}.py").write_text("from torch import nn\n\ndef build():\n    return nn.Linear(2, 2)\n")
    assert main(["init", f"{bare}:build", "--out", "p.toml"]) == 1
    said = capsys.readouterr().out
    assert f"write {bare}:batch(rank, step)" in said
    assert 'return {"input": torch.randn(4, 16, generator=generator)}' in said
    assert "There is no loss beside the factory" in said
    written = Path("p.toml").read_text()
    assert "# To be written: callable(rank, step)" in written
    assert "\nloss" not in written
    load("p.toml")


def test_a_file_that_is_there_is_left_as_it_is(net: str, capsys: Capsys) -> None:
    Path("p.toml").write_text("mine")
    assert main(["init", f"{net}:build", "--out", "p.toml"]) == 2
    assert Path("p.toml").read_text() == "mine"
    assert "p.toml is already there and is left as it is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["{net}"], 1, 'the factory must be "module:callable"'),
        (["no_such_module:build"], 1, 'there is no module "no_such_module"'),
        (["{net}:biuld"], 1, 'has no "biuld"; did you mean "build"?'),
        (["{net}:build", "--arg", "layer=3"], 1, "raised TypeError: build() got an unexpected keyword argument 'layer'"),
        (["{net}:broken"], 1, ":broken\" raised KeyError: 'no such size'"),
        (["{net}:text"], 1, ':text" gave a str, where a torch.nn.Module was expected'),
        (["{net}:empty"], 1, "the model has no parameters, so there is nothing to plan"),
        (["{net}:build", "--arg", "layers"], 2, "--arg layers is not understood; write KEY=VALUE"),
        (["{net}:loose", "--out", "{net}.py/p.toml"], 1, "cannot be written"),
        ([], 2, "arguments are required: module:factory"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_writes_nothing(
    net: str, capsys: Capsys, arguments: list[str], code: int, says: str
) -> None:
    assert main(["init", *[argument.format(net=net) for argument in arguments]]) == code
    assert says in capsys.readouterr().err
    assert not list(Path().rglob("*.toml"))


@pytest.mark.parametrize("value", [1, 2.5, 1e-3, True, 'a "b" \x7f é\n', [1, [2]], {"a b": {"c": []}}, {}, float("inf")])
def test_an_argument_is_the_same_after_it_was_written_to_the_plan(value: object) -> None:
    assert from_toml(to_toml(value)) == value


def test_a_word_without_quotes_is_a_string() -> None:
    assert from_toml("llama-3") == "llama-3"
    assert from_toml("1\nb = 2") == "1\nb = 2"


def test_stages_are_written_with_their_cuts_and_ranks(net: str, capsys: Capsys) -> None:
    assert main(["init", f"{net}:build", "--arg", "layers=2", "--stages", "2", "--out", "p.toml"]) == 0
    said, plan = capsys.readouterr().out, load("p.toml")
    assert plan.pipeline is not None
    assert (plan.pipeline.cuts, plan.pipeline.stages, plan.pipeline.schedule) == (("layers.0.heads.1",), None, "1F1B")
    assert (plan.parallel.pp, plan.step.microbatches, plan.stages) == (2, 2, 2)
    assert "It is cut into 2 stages of about equally many parameters, behind layers.0.heads.1." in said
    assert resolved(plan).entries
    assert main(["stages", "p.toml"]) == 0
    assert capsys.readouterr().out.startswith("p.toml: 2 stages on 2 ranks of pp by 1F1B, 2 microbatches\n")


@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule", "says"),
    [
        (3, 4, "1F1B", ()),
        (
            5,
            4,
            "GPipe",
            ('Its schedule is GPipe, since 4 microbatches are all that a batch can be cut into: "1F1B" needs 5.',),
        ),
    ],
)
def test_microbatches_of_stages_divide_the_batch_and_the_schedule_takes_them(
    net: str, monkeypatch: pytest.MonkeyPatch, stages: int, microbatches: int, schedule: str, says: tuple[str, ...]
) -> None:
    """The batch has 4 rows: of 3 stages it is cut into 4, and 5 stages are more than 1F1B could have."""
    monkeypatch.syspath_prepend(Path.cwd())
    source = PlanSource(f"{net}:build", {"layers": 5}, f"{net}:batch", f"{net}:loss", (0,))
    bucket, out = draft(importlib.import_module(net).build(layers=5)), Path("p.toml")
    found = stages_draft(source, bucket, out, stages, lambda _: None)
    (plan,) = parse_plans(plan_text(source, bucket, found), out)
    assert plan.pipeline is not None
    assert (plan.step.microbatches, plan.pipeline.schedule) == (microbatches, schedule)
    assert (plan.parallel.pp, plan.stages) == (stages, stages)
    assert tuple(said_of(found))[2:] == says


def test_stages_without_a_batch_are_left_to_be_proposed(net: str, capsys: Capsys) -> None:
    Path(f"{net}_alone.py").write_text(f"from {net} import build\n")
    assert main(["init", f"{net}_alone:build", "--stages", "2", "--out", "p.toml"]) == 1
    plan = load("p.toml")
    assert plan.pipeline is not None
    assert (plan.pipeline.cuts, plan.pipeline.stages, plan.step.microbatches) == ((), 2, 2)
    assert "It asks for 2 stages, whose cuts are proposed when there is a batch." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        ("1", "--stages must be a whole number of at least 2, not 1"),
        ("50", "modules to cut behind, too few for 50 stages"),
    ],
)
def test_stages_that_cannot_be_are_told_and_nothing_is_written(net: str, capsys: Capsys, stages: str, says: str) -> None:
    assert main(["init", f"{net}:build", "--arg", "layers=1", "--stages", stages, "--out", "p.toml"]) == 1
    assert says in capsys.readouterr().err
    assert not Path("p.toml").exists()
