"""A plugin for the runs of the soak: writes what all processes hold after the first items, and after the last."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from suites.soak.holdings import cpu_ticks, descendants, everybody


def pytest_addoption(parser):
    group = parser.getgroup("soak")
    group.addoption("--soak-items", type=int, default=10)
    group.addoption("--soak-warm", type=int, default=5, help="items after which the first look is taken")
    group.addoption("--soak-report", type=Path)


QUIET_ITEMS = 3


class Probe:
    def __init__(self, config):
        self._warm, self._report = config.getoption("soak_warm"), config.getoption("soak_report")
        self._done, self._looks = 0, []
        self._quiet, self._ticks = 0, -1

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        result = yield
        self._done += 1
        # Groups that a job made end with the next one.
        is_first = not self._looks and self._done >= self._warm and self._is_server_quiet() and "make_groups" not in item.name
        if is_first or self._done == len(item.session.items):
            self._looks.append({pid: asdict(one) for pid, one in everybody().items()})
            self._report.write_text(json.dumps(self._looks))
        return result

    def _is_server_quiet(self):
        """Whether the fork server has imported all that it imports when idle: it computed nothing for a few items."""
        ticks = cpu_ticks(descendants(os.getpid())[0])
        self._quiet = self._quiet + 1 if ticks == self._ticks else 0
        self._ticks = ticks
        return self._quiet >= QUIET_ITEMS


def pytest_configure(config):
    if config.getoption("soak_report"):
        config.pluginmanager.register(Probe(config), "soak-probe")
