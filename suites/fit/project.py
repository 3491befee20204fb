"""A user's project as the tutorial has it: its model, and a plan of that."""

from __future__ import annotations

from pathlib import Path

from suites.docs.blocks import of


def plan_of(module: str, *off: str) -> str:
    """A plan of the model that ``mytrainer.{module}`` builds, without the checks ``off``."""
    return f"""
[model]
factory = "mytrainer.{module}:build"
args = {{ layers = 1 }}
batch = "mytrainer.net:batch"
loss = "mytrainer.net:loss"

[parallel]
dp_shard = 2

[bucket]
plan = ["embed", "layers.0", "head"]

[checks]
{"".join(f"{name} = false{chr(10)}" for name in off)}"""


def write(folder: Path, **files: str) -> None:
    """The tutorial's module, and ``files``, whose names have ``__`` for ``/``: plans are named without their ending."""
    (block,) = (block for block in of("python") if block.page == "docs/tutorial.md" and block.file == "mytrainer/net.py")
    named = {name.replace("__", "/") + (".toml" if name.startswith("plans") else ".py"): text for name, text in files.items()}
    for path, text in {"mytrainer/net.py": block.text, "pytest.ini": "[pytest]\n", **named}.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
