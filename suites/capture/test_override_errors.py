"""Overrides of a plan that cannot be: each is one sentence."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from pytest_fxbucket.errors import CaptureError, FxbucketError, PlanError
from pytest_fxbucket.train_step import capture_step
from suites.capture import override_models as models
from suites.capture.override_plans import captured, override, plan_of

WHERE = "plan.toml: [override]"
HOLDS = "holds Chooses"
MATCHING = {
    "no such module": (
        plan_of(HOLDS, override(module="hold")),
        f'{WHERE} module: entry "hold" matches nothing; did you mean "held"',
    ),
    "a star that is no parent": (
        plan_of(HOLDS, override(module="first.*")),
        f'{WHERE} module: entry "first.*" matches nothing',
    ),
    "no such class": (
        plan_of(HOLDS, override(type="Chosen")),
        f'{WHERE} type: module "suites.capture.override_models" has no "Chosen"',
    ),
    "no module of the class": (
        plan_of(HOLDS, override(type="Attends")),
        f"{WHERE} type: no module of the model is of class Attends; its modules are of Chooses, Linear",
    ),
    "no class": (
        plan_of(HOLDS, override(type="holds")),
        f'{WHERE} type: "suites.capture.override_models:holds" is a function, expected a class',
    ),
    "the whole model": (
        plan_of(HOLDS, override(type="Holds")),
        f"{WHERE} type: the whole model is of class Holds; name a module within it",
    ),
    "twice": (
        plan_of(HOLDS, override(module="held"), override(type="Chooses")),
        "plan.toml: [[override]] 2: held is overridden by [[override]] 1 too; let one of them name it",
    ),
    "within another": (
        plan_of("Deep", override(module="layers.0"), override(type="Chooses")),
        "plan.toml: [[override]] 2: layers.0.1 lies in layers.0, which is overridden as a whole; name one of the two",
    ),
    "never called": (plan_of("Idles", override(module="held")), f"{WHERE}: held is overridden, but the step never calls it"),
    "parted": (
        plan_of("Deep", override(module="layers.0"), tp=2, tp_plan={"layers.0.0": "colwise"}),
        f"{WHERE}: layers.0 is overridden, and [parallel] tp_plan parts layers.0.0, which happens where a module is traced",
    ),
    "checkpoint within": (
        plan_of("Deep", override(module="layers.0"), checkpoint="layers.0.1"),
        f"{WHERE}: layers.0 is overridden as a whole, so [step] checkpoint cannot compute layers.0.1 in it again",
    ),
}
SUBGRAPHS = {
    "nothing": f"{WHERE}: nothing gave nothing for module held, so its anchor would be left over; let it return the forward",
    "a_number": f"{WHERE}: a_number gave a value of type int for module held, expected a function or a Subgraph",
    "fake_state": f"{WHERE}: fake_state gave state mean of module held without values",
    "taken_state": f"{WHERE}: taken_state calls state of module held 'low', which is taken",
    "forgets_state": "the sub-graph forgets_state of module held gives no new value of its state rows",
    "grows_state": "the sub-graph grows_state of module held gives rows a new value of float32[2], and it is float32[1]",
    "no_pair": "the sub-graph no_pair of module held has state, so it is to give (output, dict of new values), and gives a",
    "reads_unknown": "the sub-graph of module held reads 'low.weigth', which is neither parameter, buffer nor state of it; "
    "did you",
    "reads_module": "the sub-graph reads_module of module held uses a tensor that is neither given to it nor state",
    "writes_state": "the sub-graph writes_state of module held writes rows in place; keep what changes in state",
    "asks_values": "the sub-graph asks_values of module held failed at suites/capture/override_subgraphs.py",
    "raises_in_subgraph": "the sub-graph raises_in_subgraph of module held failed at suites/capture/override_subgraphs.py",
}


@pytest.mark.parametrize(("plan", "sentence"), MATCHING.values(), ids=MATCHING.keys())
def test_an_override_that_names_wrongly_says_what_there_is(plan: object, sentence: str) -> None:
    with pytest.raises(FxbucketError, match=f"^{re.escape(sentence)}") as caught:
        captured(plan)  # type: ignore[arg-type]
    assert type(caught.value) is (CaptureError if "never calls" in sentence else PlanError)


@pytest.mark.parametrize(("by", "sentence"), SUBGRAPHS.items(), ids=SUBGRAPHS.keys())
def test_a_subgraph_that_cannot_stand_for_its_module_is_named(by: str, sentence: str) -> None:
    with pytest.raises(CaptureError, match=f"^{re.escape(sentence)}") as caught:
        captured(plan_of(HOLDS, override(by, module="held")))
    assert "\n" not in str(caught.value)


def test_random_numbers_of_a_subgraph_that_is_computed_again_are_refused() -> None:
    plan = plan_of("Deep", override("draws", type="Chooses"), checkpoint="layers.*")
    with pytest.raises(CaptureError, match=r"^module layers\.1\.1 draws random numbers .* in a sub-graph that is"):
        captured(plan)


def test_what_is_given_to_a_module_must_be_plain() -> None:
    model = models.Holds(models.Chooses())
    model.held.forward = lambda x, of: x  # type: ignore[method-assign]
    step = capture_step(lambda x: model.held(x, object()).sum(), model=model, overrides={"held": "call"})
    sentence = "module held is given a value of type object; a module that is overridden takes and gives tensors"
    with pytest.raises(CaptureError, match=re.escape(sentence)):
        step(torch.ones(2, 6))


@pytest.mark.parametrize(("given", "first"), [((), "no tensor"), ((torch.ones(2, dtype=torch.int64),), "torch.int64 first")])
def test_a_result_that_cannot_be_like_what_is_given_is_to_be_said(given: tuple[torch.Tensor, ...], first: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    step = capture_step(lambda: model[0](*given).sum().backward(), model=model, overrides={"0": "call"})
    with pytest.raises(CaptureError, match=rf"module 0 is given {first}.*; say by output what a call gives$"):
        step()


def test_autocast_around_an_overridden_module_is_refused() -> None:
    model = models.Holds(models.Chooses())

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).sum().detach()

    with pytest.raises(CaptureError, match=r"module held is overridden and called under torch\.autocast"):
        capture_step(step, model=model, overrides={"held": "call"})(torch.ones(2, 6))


def test_an_input_written_after_the_call_is_refused() -> None:
    """Backward would call the module again with what was written."""

    class Writes(models.Holds):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            out = self.held(x)
            x.add_(1)
            return self.last(out)

    model = Writes(models.Chooses())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    with pytest.raises(CaptureError, match="what module held was given, or reads, is written in place after its call"):
        capture_step(step, model=model, overrides={"held": "call"})(torch.ones(2, 6))


IN_PYTHON = {
    "no such module": ({"hold": "call"}, "overrides['hold']: the model has no module 'hold'; did you mean 'held'?"),
    "no class of the model": (
        {nn.Bilinear: "call"},
        "overrides[Bilinear]: no module of the model is of class Bilinear; did you mean Linear?",
    ),
    "no key": ({3: "call"}, "overrides[3]: a key is the FQN of a module or a class, not a value of type int"),
    "no value": ({"held": "real"}, "overrides['held'] is 'real', expected \"call\", a callable(module) or an Override"),
    "twice": ({"held": "call", models.Chooses: "call"}, "overrides[Chooses]: held is overridden by overrides['held'] too"),
}


@pytest.mark.parametrize(("overrides", "sentence"), IN_PYTHON.values(), ids=IN_PYTHON.keys())
def test_overrides_in_python_are_looked_at_at_once(overrides: dict[object, object], sentence: str) -> None:
    model = models.Holds(models.Chooses())
    with pytest.raises(CaptureError, match=f"^{re.escape(sentence)}"):
        capture_step(lambda x: model(x).sum(), model=model, overrides=overrides)  # type: ignore[arg-type]
