"""Figures are found from sums of them: exactly where they can be, all together always, and never below zero."""

from __future__ import annotations

import pytest

from pytest_fxbucket.simulate.calibrate import Measurement, fitted


def test_figures_that_explain_all_are_found() -> None:
    sums = [Measurement((a, b), 3.0 * a + 0.5 * b) for a, b in [(1, 0), (2, 5), (0, 4), (7, 1)]]
    assert fitted(sums, [1.0, 1.0]) == pytest.approx((3.0, 0.5), rel=1e-3)


def test_all_together_take_as_long_as_was_measured() -> None:
    sums = [Measurement((1.0, a), seconds) for a, seconds in [(1, 5.0), (2, 4.0), (3, 9.0), (4, 1.0)]]
    one, other = fitted(sums, [1.0, 1.0])
    assert sum(one + other * a for a in (1, 2, 3, 4)) == pytest.approx(19.0, rel=1e-3)
    assert min(one, other) >= 0


def test_a_figure_that_nothing_tells_stays() -> None:
    assert fitted([Measurement((1.0, 0.0), 2.0)], [1.0, 7.0]) == pytest.approx((2.0, 7.0))
    assert fitted([], [1.0, 7.0]) == (1.0, 7.0)


def test_what_took_no_longer_only_makes_figures_smaller() -> None:
    assert fitted([Measurement((1.0,), 5.0, is_bound=True)], [2.0]) == pytest.approx((2.0,))
    assert fitted([Measurement((1.0,), 5.0, is_bound=True)], [8.0]) == pytest.approx((5.0,))
