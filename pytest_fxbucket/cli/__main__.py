"""``python -m pytest_fxbucket.cli`` is ``fxbucket``."""

from __future__ import annotations

from pytest_fxbucket.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
