"""A plugin for the runs of the soak: writes what all processes hold after the first items, and after the last."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from suites.soak.holdings import everybody


def pytest_addoption(parser):
    group = parser.getgroup("soak")
    group.addoption("--soak-items", type=int, default=10)
    group.addoption("--soak-warm", type=int, default=5, help="items after which the first look is taken")
    group.addoption("--soak-report", type=Path)


class Probe:
    def __init__(self, config):
        self._warm, self._report = config.getoption("soak_warm"), config.getoption("soak_report")
        self._done, self._looks = 0, []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        result = yield
        self._done += 1
        if self._done in (self._warm, len(item.session.items)):
            self._looks.append({pid: asdict(one) for pid, one in everybody().items()})
            self._report.write_text(json.dumps(self._looks))
        return result


def pytest_configure(config):
    if config.getoption("soak_report"):
        config.pluginmanager.register(Probe(config), "soak-probe")
