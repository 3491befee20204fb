"""pytest's terminal reporter, made silent and not taken away: pytest asks it for its writer to explain assertions."""

from __future__ import annotations

import os

import pytest

# Run on pytest 9.2 only; create_terminal_writer and TerminalReporter._tw are as old as pytest 5.4.
from _pytest.config import create_terminal_writer


def silence(config: pytest.Config) -> None:
    """Let nothing be printed by the reporter from now on, if there is one."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter._tw = create_terminal_writer(config, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
