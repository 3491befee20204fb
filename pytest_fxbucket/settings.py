"""How plans are run in a session."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How plans are run in this session."""

    rootdir: Path
    golden_dir: Path
    artifacts: Path
    pass_name: str | None = None
    """Instead of the plan's passes; None: the plan's."""
    backend: str | None = None
    """Instead of the plan's; None: the plan's."""
    require_gpus: bool = False
    """Whether it is an error when GPUs are too few for the back end, and not a skip, or gloo for auto."""
    accept: str | None = None
    """new, changed, all: which goldens may be written; None: none."""
    log_of: str | None = None
    """Name of this process's log, if that is all that it leaves below ``artifacts``; None: it leaves everything."""
