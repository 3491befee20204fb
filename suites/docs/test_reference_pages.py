"""The reference pages have every key, option, fixture, marker and command that there is."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from importlib import import_module

import pytest
from _pytest.fixtures import FixtureFunctionDefinition

from pytest_fxbucket.cli import __main__ as cli
from pytest_fxbucket.plan.cluster import Link, MemoryLimits, OverlapLimits
from pytest_fxbucket.plan.schema import Key, keys
from pytest_fxbucket.plan.schema_checks import Benchmark, Mutation, Ring
from pytest_fxbucket.pytest_plugin import plugin
from pytest_fxbucket.pytest_plugin.options import TABLE
from suites.docs.blocks import ROOT
from suites.plans.plan_reference import END, PAGE, reference, replaced

OPTIONS: dict[tuple[str, str], type] = {
    ("run", "ring"): Ring,
    ("cluster", "within"): Link,
    ("cluster", "between"): Link,
    ("checks", "benchmark"): Benchmark,
    ("checks", "overlap"): OverlapLimits,
    ("checks", "memory"): MemoryLimits,
    ("checks", "mutation"): Mutation,
}
"""Tables that values may be."""


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")


def test_the_table_of_the_plan_file_is_what_the_schema_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert replaced(text) == text, "the table is not the schema's: make reference, and review the diff"


def test_every_key_has_one_row_and_no_cell_is_empty() -> None:
    rows = [row.strip("| ").split(" | ") for row in reference().splitlines()[2:]]
    names = [name for key in keys() for name in (f"{key.table}.{key.key}", *_within(key))]
    assert [row[0] for row in rows] == [f"`{name}`" for name in names]
    assert [row for row in rows if len(row) != 4 or not all(cell.strip() for cell in row)] == []


def _within(key: Key) -> list[str]:
    """Keys of the table that the key's value may be."""
    options = OPTIONS.get((key.table, key.key))
    return [f"{key.table}.{key.key}.{spec.name}" for spec in dataclasses.fields(options)] if options is not None else []


def test_a_page_without_the_marks_of_the_table_is_not_written_to() -> None:
    with pytest.raises(ValueError, match="the page has no table between"):
        replaced(page("plan").replace(END, ""))


def test_every_option_and_its_twin_is_in_the_table() -> None:
    text = page("options")
    assert [row.flag for row in TABLE if (row.metavar or row.ini_type == "bool") and f"`{row.flag}" not in text] == []
    assert [row.dest for row in TABLE if f"`{row.dest}`" not in text] == []
    assert sorted(set(re.findall(r"fxbucket-[a-z-]+[a-z]", text))) == sorted(
        row.flag.removeprefix("--") for row in TABLE if row.metavar or row.ini_type == "bool"
    )


def test_every_fixture_and_marker_is_in_a_table() -> None:
    fixtures = {name for name, value in inspect.getmembers(plugin) if isinstance(value, FixtureFunctionDefinition)}
    markers = {marker.partition("(")[0] for marker in (plugin.MARKER, plugin.body.MARKER)}
    both = page("fixtures").split("| marker |")
    assert [set(re.findall(r"^\| `(\w+)`", part, re.MULTILINE)) for part in both] == [fixtures, markers]


def test_every_command_and_each_of_its_options_is_there() -> None:
    text = page("cli")
    for name in cli.COMMANDS:
        parser = argparse.ArgumentParser()
        import_module(f"pytest_fxbucket.cli.{name}").add_arguments(parser)
        options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
        section = text[text.index(f"## {name}\n") :].split("\n## ")[0]
        assert [option for option in options if option != "--help" and option not in section] == [], name
