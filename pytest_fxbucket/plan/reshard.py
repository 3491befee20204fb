"""``[parallel] reshard_after_forward``: which entries' parameters are gathered again in backward. Pure; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_fxbucket.errors import PlanError
from pytest_fxbucket.plan.entries import parse_entries
from pytest_fxbucket.plan.hints import some
from pytest_fxbucket.plan.rules import Metadata, Rule, wrong
from pytest_fxbucket.plan.selector import ROOT
from pytest_fxbucket.units import show

Asked = bool | Mapping[str, bool] | None
"""For all entries, by selector of entries, or (None, and entries that no selector names) as FSDP2 has it by default."""

WHERE = "[parallel] reshard_after_forward"


def reshard(doc: str) -> Metadata:
    """Take true, false, or a table of selector = true or false; selectors are left as they are written."""
    expects = 'true, false or a table such as { "layers.*" = true, "norm+output" = false }'

    def read(value: object, where: str) -> object:
        if isinstance(value, bool):
            return value
        if not isinstance(value, Mapping) or not value:
            raise wrong(where, expects, value)
        for selector, again in value.items():
            parse_entries([selector], where)
            if not isinstance(again, bool):
                raise wrong(f'{where}."{selector}"', "true or false; a selector with dots stands in quotes", again)
        return dict(value)

    return {"rule": Rule(doc, expects, read, (False, True))}


def kept_entries(asked: Asked, entries: Sequence[str], last: str | None) -> frozenset[str]:
    """Which of ``entries`` stay gathered until backward; ``last`` is the one that forward reads last.

    Left out it is as in FSDP2, whose root stays since backward needs it at once: what no entry names (``unplanned = "root"``),
    and the entry that forward reads last. Raises PlanError for a selector that stands for no entry, and for two that differ.
    """
    if isinstance(asked, bool):
        return frozenset(() if asked else entries)
    named = _by_entry(asked or {}, entries)
    return frozenset(entry for entry in entries if not named.get(entry, entry not in (last, ROOT)))


def _by_entry(asked: Mapping[str, bool], entries: Sequence[str]) -> dict[str, bool]:
    found: dict[str, tuple[str, bool]] = {}
    for selector, again in asked.items():
        matched = [entry for entry in entries if _stands_for(selector, entry)]
        if not matched:
            raise PlanError(f'{WHERE} names "{selector}", which is no entry of [bucket] plan; entries are {some(entries)}')
        for entry in matched:
            other, before = found.setdefault(entry, (selector, again))
            if before != again:
                raise PlanError(
                    f'{WHERE} is {show(before)} for {entry} by "{other}" and {show(again)} by "{selector}"; '
                    "let one of them name it"
                )
    return {entry: again for entry, (_, again) in found.items()}


def _stands_for(selector: str, entry: str) -> bool:
    """Whether each module of ``entry`` is one that ``selector`` names."""
    patterns = [name for one in parse_entries([selector], WHERE) for name in one.selectors]
    names = [name for one in parse_entries([entry], WHERE) for name in one.selectors]
    return selector == entry or all(any(_matches(pattern, name) for pattern in patterns) for name in names)


def _matches(pattern: str, name: str) -> bool:
    parts, own = pattern.split("."), name.split(".")
    return len(parts) == len(own) and all(a in ("*", b) for a, b in zip(parts, own, strict=True))
