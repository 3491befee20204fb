"""From entries to parameters: every parameter once, or a sentence that says why not."""

from __future__ import annotations

import pytest

from pytest_fxbucket.plan import PlanError, Resolution, ResolvedEntry, parse_entries, resolve

PARAMETERS = [
    "tok.weight",
    "layers.0.attn.weight",
    "layers.0.scale",
    "layers.1.attn.weight",
    "layers.1.scale",
    "norm.weight",
]
MODULES = [
    "", "tok", "drop", "layers", "layers.0", "layers.0.attn", "layers.1", "layers.1.attn", "layers.2", "norm", "out",
]  # fmt: skip
TIED = {"out.weight": "tok.weight"}
LAYER_0 = ("layers.0.attn.weight", "layers.0.scale")
LAYER_1 = ("layers.1.attn.weight", "layers.1.scale")


def found(raw: object, unplanned: str = "allow", prefix: str = "") -> Resolution:
    def wrapped(names: list[str]) -> list[str]:
        return [f"{prefix}{name}" if name else name for name in names]

    aliases = {prefix + alias: prefix + fqn for alias, fqn in TIED.items()}
    return resolve(
        parse_entries(raw, "W"),
        wrapped(PARAMETERS),
        wrapped(MODULES) + ([prefix[:-1]] if prefix else []),
        aliases=aliases,
        unplanned=unplanned,
        where="W",
    )


def error_of(raw: object, unplanned: str = "allow", prefix: str = "") -> str:
    with pytest.raises(PlanError) as caught:
        found(raw, unplanned, prefix)
    message = str(caught.value)
    assert message.startswith("W: ")
    assert "\n" not in message
    return message.removeprefix("W: ")


def test_every_kind_of_selector_finds_its_parameters_in_the_order_of_a_unit() -> None:
    resolution = found(["layers.1", "norm+tok", "layers.0.scale", "layers.0.attn"], unplanned="error")
    assert resolution == Resolution(
        (
            ResolvedEntry("layers.1", LAYER_1),
            ResolvedEntry("norm+tok", ("norm.weight", "tok.weight")),
            ResolvedEntry("layers.0.scale", ("layers.0.scale",)),
            ResolvedEntry("layers.0.attn", ("layers.0.attn.weight",)),
        ),
        (),
        (),
    )


def test_a_name_is_no_prefix_of_a_longer_number() -> None:
    many = [f"l.{i}.w" for i in range(12)]
    resolution = resolve(parse_entries(["l.1"], "W"), many, ["l", *[f"l.{i}" for i in range(12)]], unplanned="allow")
    assert resolution.entries[0].parameters == ("l.1.w",)


def test_a_star_gives_an_entry_for_each_child_and_says_which_it_left_out() -> None:
    resolution = found(["layers.*"])
    assert resolution.entries == (ResolvedEntry("layers.0", LAYER_0), ResolvedEntry("layers.1", LAYER_1))
    assert resolution.notes == ('entry "layers.*" leaves out layers.2: no parameters there',)


def test_a_star_in_the_middle_reaches_the_same_part_of_each_child() -> None:
    resolution = found(["layers.*.attn"])
    assert [entry.name for entry in resolution.entries] == ["layers.0.attn", "layers.1.attn"]


def test_a_star_within_plus_stays_one_entry() -> None:
    resolution = found(["layers.*+norm"])
    assert resolution.entries == (ResolvedEntry("layers.*+norm", (*LAYER_0, *LAYER_1, "norm.weight")),)


def test_a_tied_module_stands_for_the_canonical_parameter() -> None:
    assert found(["out"]).entries == (ResolvedEntry("out", ("tok.weight",)),)
    assert found(["out.weight"]).entries == (ResolvedEntry("out.weight", ("tok.weight",)),)
    assert found(["tok+out"]).entries == (ResolvedEntry("tok+out", ("tok.weight",)),)


def test_parameters_in_no_entry_are_an_error_a_list_or_a_last_entry_as_asked() -> None:
    assert found(["layers", "tok"]).unplanned == ("norm.weight",)
    root = found(["layers"], unplanned="root")
    assert root.entries[-1] == ResolvedEntry("root", ("tok.weight", "norm.weight"))
    assert root.unplanned == ()
    assert found(["layers", "tok", "norm"], unplanned="root").entries[-1].name == "norm"
    message = error_of(["norm"], unplanned="error")
    assert message.startswith("5 parameters are in no entry (tok.weight, layers.0.attn.weight, layers.0.scale and 2 more)")
    assert '"root"' in message
    assert '"allow"' in message
    assert error_of(["tok", "layers"], unplanned="error").startswith("1 parameter is in no entry (norm.weight); add an")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (["tok", "layers.0"], '"layers.1"'),
        (["tok", "layers.0.attn", "layers.1"], '"layers.0.scale"'),
        (["tok", "layers.0.attn"], '"layers.0.scale"'),
        (["tok", "layers.0.scale+layers.1", "norm"], '"layers.0.attn"'),
        (["tok", "norm"], '"layers.0.attn"'),
    ],
)
def test_a_parameter_in_no_entry_is_led_to_one_like_its_siblings(raw: object, says: str) -> None:
    assert f"add an entry such as {says}, or" in error_of(raw, unplanned="error")


def test_a_graph_without_any_names_is_to_keep_its_module_stack() -> None:
    with pytest.raises(PlanError) as caught:
        resolve(parse_entries(["layers.0"], "here"), [], [""], where="here")
    assert str(caught.value) == (
        'here: entry "layers.0" matches nothing; the graph names no parameters: trace it so that its nodes keep '
        "nn_module_stack, or leave the plan out here"
    )


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (["nrom"], 'entry "nrom" matches nothing; did you mean "norm"?'),
        (["norm.wieght"], '"norm" has children weight; did you mean "norm.weight"'),
        (["layers.[3-7]"], 'entry "layers.3" matches nothing; "layers" has children 0..2'),
        (["norm+layerz"], 'entry "norm+layerz": "layerz" matches nothing; did you mean "layers"'),
        (["scal"], 'entry "scal" matches nothing; did you mean "layers.0.scale"?'),
        (["attn"], '"layers.0.attn" exists, so write it with "layers.0." before it'),
        (["_orig_mod.layers.0"], '"layers.0" exists, so write it without "_orig_mod."'),
        (["drop"], 'entry "drop" is a module without parameters; take it out'),
        (["norm+drop"], 'entry "norm+drop": "drop" is a module without parameters; take it out'),
        (["layers.[1-2]"], 'entry "layers.2" is a module without parameters; take it out'),
        (["norm.*"], 'entry "norm.*" matches nothing: "norm" has no child modules'),
        (["layrs.*"], 'entry "layrs.*": "layrs" matches nothing; did you mean "layers"'),
        (["layers.*.mlp"], '"layers.0.mlp" matches nothing; "layers.0" has children attn, scale'),
        (["qqq"], 'entry "qqq" matches nothing; the model has tok, drop, layers and 2 more'),
    ],
)
def test_an_entry_that_matches_nothing_is_led_to_the_nearest_name(raw: object, says: str) -> None:
    assert says in error_of(raw)


def test_a_wrapper_around_the_model_is_named_as_what_stands_in_the_way() -> None:
    assert error_of(["layers.[0-1]"], prefix="model.") == (
        'entry "layers.0" matches nothing; "model.layers.0" exists, so write it with "model." before it'
    )


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (["layers", "layers.0"], 'entries "layers" and "layers.0" both hold layers.0.attn.weight'),
        (["layers.0", "norm+layers"], 'entries "layers.0" and "norm+layers" both hold layers.0.attn.weight'),
        (["norm", "norm"], 'entry "norm" is there twice;'),
        (["layers.*", "layers.1"], 'entry "layers.1" is there twice (once from "layers.*");'),
        (["layers.1", "layers.*"], 'entry "layers.1" is there twice (once from "layers.*");'),
        (["norm", "norm.weight"], 'entries "norm" and "norm.weight" both hold norm.weight'),
    ],
)
def test_a_parameter_in_two_entries_names_both_and_the_parameter(raw: object, says: str) -> None:
    assert error_of(raw).startswith(says)


def test_entries_that_share_a_tied_parameter_are_told_to_become_one() -> None:
    message = error_of(["tok", "out+norm"])
    assert "tied parameter, tok.weight and out.weight being one" in message
    assert message.endswith('make them one entry, "tok+out+norm"')


def test_an_entry_named_root_beside_the_root_is_refused() -> None:
    with pytest.raises(PlanError, match='entry "root" has the name'):
        resolve(parse_entries(["root"], "W"), ["root.w", "x.w"], ["root", "x"], unplanned="root")


def test_a_plan_of_a_thousand_layers_resolves_in_one_walk() -> None:
    parameters = [f"layers.{i}.mlp.w{j}" for i in range(1000) for j in range(9)]
    modules = ["layers", *[f"layers.{i}" for i in range(1000)], *[f"layers.{i}.mlp" for i in range(1000)]]
    resolution = resolve(parse_entries(["layers.[0-999]"], "W"), parameters, modules)
    assert sum(len(entry.parameters) for entry in resolution.entries) == 9000
