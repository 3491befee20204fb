"""Keys of a TOML file are changed where they stand, and nothing else is."""

from __future__ import annotations

import tomllib

import pytest

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.tune.toml_edit import edited

TEXT = """# A plan.
[model]  # of ours
factory = "m:build"
text = '''
[bucket]
plan = "no"
'''

[ bucket ]  # what is gathered together
plan = [  # in order
    "a",  # first
    "b#c",
]  # all
cap_mb = 4  # MiB

# Where launches stand.
[overlap]
"prefetch" = 0
[[matrix]]
id = "x"
"""


def test_a_value_is_changed_and_comments_stay() -> None:
    new = edited(TEXT, {("bucket", "plan"): ["d", "e"], ("overlap", "prefetch"): 2}, "p.toml")
    assert new == TEXT.replace(
        'plan = [  # in order\n    "a",  # first\n    "b#c",\n]  # all', '# in order\n# first\nplan = ["d", "e"]  # all'
    ).replace('"prefetch" = 0', "prefetch = 2")


def test_a_hash_in_single_quotes_begins_no_comment() -> None:
    text = "[bucket]\nplan = [\n    'a#b',  # first\n    'half a \" #',\n]\n"
    assert edited(text, {("bucket", "plan"): ["c"]}, "p.toml") == '[bucket]\n# first\nplan = ["c"]\n'


def test_a_new_key_stands_behind_the_last_of_its_table() -> None:
    new = edited(TEXT, {("bucket", "by"): "overlap", ("overlap", "schedule"): "auto"}, "p.toml")
    assert new == TEXT.replace("# MiB\n", '# MiB\nby = "overlap"\n').replace(
        '"prefetch" = 0\n', '"prefetch" = 0\nschedule = "auto"\n'
    )


def test_a_key_that_goes_leaves_its_comment() -> None:
    new = edited(TEXT, {("bucket", "cap_mb"): None, ("overlap", "prefetch"): None, ("overlap", "updates"): None}, "p.toml")
    assert new == TEXT.replace("cap_mb = 4  # MiB", "# MiB").replace('"prefetch" = 0\n', "")


def test_a_new_table_stands_behind_the_buckets() -> None:
    bare = TEXT[: TEXT.index("# Where")] + TEXT[TEXT.index("[[matrix]]") :]
    new = edited(bare, {("overlap", "prefetch"): 2}, "p.toml")
    assert new == bare.replace("# MiB\n", "# MiB\n\n[overlap]\nprefetch = 2\n")
    assert edited("a = 1", {("overlap", "prefetch"): 2}, "") == "a = 1\n\n[overlap]\nprefetch = 2\n"


def test_a_long_list_is_broken_into_lines() -> None:
    names = [f"layers.{number}+layers.{number + 1}" for number in range(0, 40, 2)]
    new = edited(TEXT, {("bucket", "plan"): names}, "p.toml")
    assert tomllib.loads(new)["bucket"]["plan"] == names
    assert max(map(len, new.splitlines())) <= 128
    assert new.count("\n") < TEXT.count("\n") + 6


def test_line_ends_stay() -> None:
    new = edited(TEXT.replace("\n", "\r\n"), {("bucket", "plan"): ["d"], ("bucket", "by"): "overlap"}, "p.toml")
    assert new.count("\n") == new.count("\r\n") == TEXT.count("\n") + 1 - 1


@pytest.mark.parametrize(
    "text",
    [
        "overlap = { prefetch = 0 }\n",
        "overlap.prefetch = 0\n",
        "[overlap.launch_at]\nforward = {}\n[overlap]\nprefetch.x = 0\n",
    ],
)
def test_what_has_no_line_of_its_own_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"^p\.toml: \[overlap\] prefetch stands in no line of its own below \[overlap\]"):
        edited(text, {("overlap", "prefetch"): 2}, "p.toml")
