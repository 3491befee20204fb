"""What must not change while the house is rebuilt, written into a folder: ``python -m suites.corpus FOLDER``.

For every plan and row of fixtures/plans: ``explain --json``, the digest of ``show --full`` for the first, the second and the
last rank, each item's outcome and summary; every sentence that the package can say; public names with their signatures. Of two
such folders, each written in a clone of one commit, ``diff -r`` says what moved.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

_PUBLIC = ("capture", "train_step", "graph", "graph_view", "passes", "plan", "transforms", "transforms.next_iteration")
_MEASURED = re.compile(r"largest rank \d+ MiB|\d+(\.\d+)? (ms|s|MiB)\b|x \d+\.\d+|\d+ samples")


def main(folder: Path) -> None:
    """Write the whole corpus below ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "sentences.txt", sorted(set(_sentences(Path("pytest_fxbucket")))))
    _write(folder / "public.txt", sorted(_public_names()))
    with ProcessPoolExecutor(2) as pool:
        plans = sorted(Path("fixtures/plans").glob("*.toml"))
        for path, told in zip(plans, pool.map(_told, plans), strict=True):
            _write(folder / f"{path.stem}.told.txt", told)
    _write(folder / "items.txt", _items(folder / "items.xml"))


def _told(plan: Path) -> list[str]:
    from pytest_fxbucket.cli.__main__ import main as fxbucket

    lines = []

    def said(*arguments: str) -> str:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            status = fxbucket(list(arguments))
        return out.getvalue() if status == 0 else f"exit status {status}: {err.getvalue()}"

    base = said("explain", "--json", str(plan))
    rows = json.loads(base)["rows"] if base.startswith("{") else []
    for row in (None, *rows):
        name = f"{plan}::{row}" if row else str(plan)
        explained = said("explain", "--json", name) if row else base
        lines += [f"== {name}", explained]
        ranks = json.loads(explained)["ranks"] if explained.startswith("{") else 1
        for rank in sorted({0, min(1, ranks - 1), ranks - 1}):
            graph = said("show", "--full", "--rank", str(rank), name)
            lines.append(f"rank {rank}: {len(graph.splitlines())} lines, {hashlib.sha256(graph.encode()).hexdigest()}")
    return lines


def _items(report: Path) -> Iterator[str]:
    command = ["-m", "pytest", "--fxbucket-plans=fixtures/plans", "-n", "2", "-q", f"--junitxml={report}"]
    subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL)
    lines = []
    for case in ElementTree.parse(report).iter("testcase"):
        ends = [child.tag for child in case if child.tag not in ("properties", "system-out", "system-err")]
        summaries = [prop.get("value", "") for prop in case.iter("property")]
        name = f"{case.get('classname')}::{case.get('name')}"
        lines.append(f"{name} {ends[0] if ends else 'passed'}: {'; '.join(_MEASURED.sub('N', text) for text in summaries)}")
    report.unlink()
    yield from sorted(lines)


def _sentences(package: Path) -> Iterator[str]:
    """Text of four words and more that is no docstring; what is filled in is ``{}``."""
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if id(node) in bare or id(node) in inside:
                continue
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            if len(text.split()) > 3:
                yield " ".join(text.split())


def _public_names() -> Iterator[str]:
    for module in _PUBLIC:
        package = importlib.import_module(f"pytest_fxbucket.{module}")
        for name in sorted(getattr(package, "__all__", ())):
            value = getattr(package, name)
            yield f"{module}.{name}{_signature(value)}"
            for member in sorted(vars(value)) if inspect.isclass(value) else ():
                if not member.startswith("_"):
                    yield f"{module}.{name}.{member}{_signature(getattr(value, member))}"


def _signature(value: object) -> str:
    try:
        return str(inspect.signature(value)) if callable(value) else ""
    except ValueError:
        return ""


def _write(path: Path, lines: object) -> None:
    path.write_text("\n".join(map(str, lines)) + "\n")  # type: ignore[call-overload]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
