"""Degrees, modes and tables of ``[parallel]`` that do not fit each other, each with the nearest that does."""

from __future__ import annotations

import pytest

from suites.plan.plan_texts import BUCKET, GRAPH, MODEL, plan_of, refusal

HYBRID = 'mode = "hybrid_shard"\ndp_replicate = 2\ndp_shard = 4\n'
REPLICATE = 'mode = "replicate"\ndp_replicate = 4\n'
COLWISE = 'tp_plan = { "layers.*.wq" = "colwise" }\n'


def text(parallel: str, rest: str = "", subject: str = MODEL) -> str:
    return f"{subject}{BUCKET}[parallel]\n{parallel}\n{rest}"


def refused(parallel: str, rest: str = "", subject: str = MODEL) -> str:
    return refusal(text(parallel, rest, subject)).removeprefix("[parallel] ")


@pytest.mark.parametrize(
    ("parallel", "world"),
    [
        ("dp_shard = 4", 4),
        (REPLICATE, 4),
        (HYBRID, 8),
        (f"{HYBRID}tp = 2\n{COLWISE}", 16),
        ('mode = "hybrid_shard"\ndp_replicate = 2\ncp = 2', 4),
        (f'{HYBRID}ep = 2\nep_plan = ["layers.*.experts"]', 8),
        ('dp_shard = 4\nep = 4\nep_plan = ["layers.*.experts"]', 4),
        (f'{HYBRID}reduce_order = "replicate_first"', 8),
        ('mode = "mine:mode"\ntp = 2', 2),
        ("dp_shard = 1024\ntp = 4\n" + COLWISE, 4096),
    ],
)
def test_the_world_of_a_mode_is_the_product_of_its_degrees(parallel: str, world: int) -> None:
    assert plan_of(text(parallel)).world_size == world


def test_dimensions_that_the_smaller_world_leaves_out_keep_their_size() -> None:
    plan = plan_of(text(f"{HYBRID}tp = 2\n{COLWISE}", "[run]\nworld = { dp_shard = 2 }"))
    assert plan.degrees == {"pp": 1, "dp_replicate": 2, "dp_shard": 4, "cp": 1, "tp": 2}
    assert plan.run_degrees == {"pp": 1, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 2}
    assert (plan.world_size, plan.run_world) == (16, 8)


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ("dp_shard = 1", "dp_shard = 1 leaves nothing to shard; use 2 or more"),
        ("tp = 2\n" + COLWISE, "dp_shard = 1 leaves nothing to shard; use 2 or more"),
        ('mode = "replicate"', "dp_replicate = 1 leaves one copy; use 2 or more"),
        ('mode = "hybrid_shard"\ndp_shard = 4', 'dp_replicate = 1 leaves one copy; use 2 or more, or mode = "fully_shard"'),
        (
            'mode = "hybrid_shard"\ndp_replicate = 4',
            'dp_shard = 1 leaves nothing to shard; use 2 or more, or mode = "replicate"',
        ),
        (
            'mode = "hybrid_shard"\ndp_shard = 4\ncp = 2\n',
            'dp_replicate = 1 leaves one copy; use 2 or more, or mode = "fully_shard"',
        ),
        ("dp_replicate = 4", 'dp_replicate = 4 has no meaning with mode = "fully_shard"; write dp_shard = 4'),
        (
            "dp_shard = 4\ndp_replicate = 2",
            'dp_replicate = 2 has no meaning with mode = "fully_shard"; mode = "hybrid_shard" does both',
        ),
        ('mode = "replicate"\ndp_shard = 4', 'dp_shard = 4 has no meaning with mode = "replicate"; write dp_replicate = 4'),
        (REPLICATE + "dp_shard = 2", 'dp_shard = 2 has no meaning with mode = "replicate"; mode = "hybrid_shard" does both'),
        ('mode = "mine:mode"', "makes a mesh of one rank, which has nobody to talk to; set dp_shard to 2 or more"),
        (
            'dp_shard = 4\nreduce_order = "replicate_first"',
            'reduce_order is of two reductions, and mode = "fully_shard" has one; leave it out',
        ),
        (
            f'{REPLICATE}reduce_order = "replicate_first"',
            'reduce_order is of two reductions, and mode = "replicate" has one; leave it out',
        ),
        (
            f"{REPLICATE}reshard_after_forward = false",
            'reshard_after_forward is of sharded parameters, and mode = "replicate" has none; leave it out',
        ),
        (
            "dp_shard = 4\ntp = 2",
            'tp = 2 parts nothing; say what in tp_plan, as in tp_plan = { "layers.*.wq" = "colwise" }',
        ),
        ("dp_shard = 4\n" + COLWISE, "tp_plan parts nothing with tp = 1; set tp to 2 or more, or leave tp_plan out"),
        (
            'dp_shard = 4\ntp = 2\ntp_plan = { "a" = "colwize" }',
            'tp_plan."a" must be "colwise", "rowwise", "sequence", "scatter" or "gather", not "colwize"; '
            'did you mean "colwise"?',
        ),
        (
            'dp_shard = 4\ntp = 2\ntp_plan = { "a" = 3 }',
            'tp_plan."a" must be "colwise", "rowwise", "sequence", "scatter" or "gather", not 3',
        ),
        (
            'dp_shard = 4\ntp = 2\ntp_plan = { layers.0.wq = "colwise" }',
            'tp_plan has a table at layers; write a selector with dots in quotes, as in "layers.0.wq" = "colwise"',
        ),
        (
            "dp_shard = 4\ntp = 2\ntp_plan = { layers = {} }",
            'tp_plan."layers" must be "colwise", "rowwise", "sequence", "scatter" or "gather", not a table',
        ),
        (
            'dp_shard = 4\ntp = 2\ntp_plan = { "layers.[0-].wq" = "colwise" }',
            'tp_plan: entry "layers.[0-].wq" has "[0-]", which is no range; write both ends between dots, as in "layers.[0-3]"',
        ),
        (
            'dp_shard = 4\ntp = 2\ntp_plan = { "norm" = "sequence", "output" = "gather" }',
            'tp_plan has "sequence" and no "scatter"; name the module whose output is to be cut along the sequence, as in '
            '"tok_embeddings" = "scatter"',
        ),
        (
            'dp_shard = 4\ntp = 2\ntp_plan = { "a" = "scatter" }',
            'tp_plan has "scatter" and no "gather"; name the module that is to read all of the sequence, as in '
            '"output" = "gather"',
        ),
        (
            'dp_shard = 4\ntp = 2\ntp_plan = ["a"]',
            'tp_plan must be a table such as { "layers.*.wq" = "colwise", "layers.*.wo" = "rowwise" }, not a list of 1',
        ),
    ],
)
def test_what_has_no_meaning_with_its_mode_or_parts_nothing_leads_to_what_has(parallel: str, says: str) -> None:
    assert refused(parallel) == says


@pytest.mark.parametrize(
    ("parallel", "rest", "says"),
    [
        (
            'pp = 2\ndp_shard = 4\ncp = 2\ncp_form = "ring"',
            '[pipeline]\ncuts = ["a"]',
            'cp_form = "ring" is not built yet; its sends name the neighbours of each rank, and one graph of a stage serves '
            'all its ranks; use cp_form = "all_gather" beside [pipeline]',
        ),
        (
            'dp_shard = 4\ncp_form = "ring"',
            "",
            'cp_form = "ring" leads round one rank with cp = 1; set cp to 2 or more, or leave cp_form out',
        ),
        (
            'dp_shard = 4\ncp = 2\nep = 2\nep_plan = ["a"]',
            "",
            "cp = 2 is not built yet beside ep = 2; leave one of them out",
        ),
        (
            "dp_shard = 4\ncp = 2",
            '[[override]]\nmodule = ["a"]',
            "cp = 2 gathers what attention reads where a module is traced, and [[override]] leaves modules untraced; leave "
            "one of them out",
        ),
        (
            "dp_shard = 4\nep = 2",
            "",
            'ep = 2 parts nothing; name the modules in ep_plan, as in ep_plan = ["layers.*.experts"]',
        ),
        ('dp_shard = 4\nep_plan = ["a"]', "", "ep_plan parts nothing with ep = 1; set ep to 2 or more, or leave ep_plan out"),
        (
            f'{REPLICATE}ep = 2\nep_plan = ["a"]',
            "",
            'ep takes its ranks from those of dp_shard, as mode = "fully_shard" and "hybrid_shard" have them; '
            'it cannot be with mode = "replicate"',
        ),
        (
            'dp_shard = 7\nep = 3\nep_plan = ["a"]',
            "",
            "ep = 3 does not divide dp_shard = 7, from whose ranks it takes its own; use a multiple of 3, such as 6",
        ),
        (
            'dp_shard = 2\nep = 4\nep_plan = ["a"]',
            "",
            "ep = 4 does not divide dp_shard = 2, from whose ranks it takes its own; use a multiple of 4, such as 4",
        ),
        (
            'dp_shard = 8\nep = 4\nep_plan = ["a"]',
            "[run]\nworld = { dp_shard = 2 }",
            "ep = 4 does not divide [run] world.dp_shard = 2, from whose ranks it takes its own; "
            "use a multiple of 4, such as 4",
        ),
    ],
)
def test_expert_parallelism_that_parts_nothing_or_does_not_divide_is_refused(parallel: str, rest: str, says: str) -> None:
    assert refused(parallel, rest) == says


def test_a_world_with_more_ranks_than_the_mesh_is_refused_in_every_dimension() -> None:
    says = "[run] world.{0} = {1} is more than [parallel] {0} = {2}; world is for a smaller mesh"
    assert refused(HYBRID, "[run]\nworld = { dp_replicate = 3 }") == says.format("dp_replicate", 3, 2)
    assert refused(HYBRID, "[run]\nworld = { tp = 2 }") == says.format("tp", 2, 1)
    assert refused(REPLICATE, "[run]\nworld = { dp_shard = 2 }") == says.format("dp_shard", 2, 1)


def test_a_traced_graph_needs_more_than_one_rank_in_any_dimension() -> None:
    assert plan_of(text("dp_replicate = 2\ntp = 2", subject=GRAPH)).world_size == 4
    assert refused("", subject=GRAPH) == "makes a mesh of one rank, which has nobody to talk to; set dp_shard to 2 or more"


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (COLWISE, "[parallel] tp_plan"),
        ("ep = 2\n", "[parallel] ep"),
        ('ep_plan = ["a"]\n', "[parallel] ep_plan"),
        ('reduce_order = "replicate_first"\n', "[parallel] reduce_order"),
        ("pp = 2\n", "[parallel] pp"),
        ("[pipeline]\nstages = 2\n", "[pipeline]"),
        ("[step]\nmicrobatches = 2\n", "[step]"),
        ('[optimizer]\nfactory = "t:s"\n', "[optimizer]"),
    ],
)
def test_what_capture_does_is_refused_beside_a_graph_that_is_traced(line: str, key: str) -> None:
    says = f"{key} is for a [model] that is to be traced; leave it out beside [graph]"
    assert refused(f"dp_shard = 4\n{line}", subject=GRAPH) == says.removeprefix("[parallel] ")
