"""The (torch, device) pairs that the suites were really run on."""

from __future__ import annotations

TESTED: tuple[tuple[str, str], ...] = (("2.13.0", "cpu"),)


def is_tested(torch_version: str) -> bool:
    """Say whether ``torch_version`` (``"2.13.0+cpu"``; what follows ``+`` is the build and is ignored) was run."""
    return torch_version.partition("+")[0] in {version for version, _ in TESTED}
