"""An HTML page that needs nothing but itself: styles, scripts and figures stand in it, and it may load nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_fxbucket.bench.report.words import escaped

_ASSETS = Path(__file__).with_name("assets")


def html_page(title: str, parts: Iterable[str], figures: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """The page of ``parts``, which are HTML; ``figures`` by the id that :func:`figure_place` was given.

    With figures plotly.js is in it, once. Its policy lets nothing run but its own two scripts, and nothing be loaded.
    """
    scripts = []
    if figures:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]  # plotly says no types

        scripts = [get_plotlyjs(), (_ASSETS / "page.js").read_text(encoding="utf-8")]
    data = [
        f'<script type="application/json" id="{escaped(name)}">{_json(figure)}</script>'
        for name, figure in (figures or {}).items()
    ]
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="generator" content="pytest-fxbucket">',
        '<link rel="icon" href="data:,">',
        f"<title>{escaped(title)}</title>",
        f"<style>{(_ASSETS / 'page.css').read_text(encoding='utf-8')}</style>",
        "</head>",
        "<body>",
        *parts,
        *data,
        *(f"<script>{script}</script>" for script in scripts),
        "</body>",
        "</html>",
    ]
    return "\n".join(lines) + "\n"


def figure_place(name: str, *, is_linked: bool = False) -> str:
    """Where the figure ``name`` is drawn; those that are linked are zoomed together."""
    return f'<div class="figure" data-figure="{escaped(name)}"{" data-linked" if is_linked else ""}></div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    lines = ['<div class="scroll"><table><thead><tr>', *(f"<th>{cell}</th>" for cell in head), "</tr></thead><tbody>"]
    for row in rows:
        lines += ["<tr>", *(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row), "</tr>"]
    return "".join([*lines, "</tbody></table></div>"])


def _policy(scripts: Iterable[str]) -> str:
    """Content Security Policy, level 3: scripts by their digests, styles and images of the page's own."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"


def _json(value: Mapping[str, Any]) -> str:
    """JSON that no HTML parser takes for the end of its script."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
