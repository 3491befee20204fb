"""Random steps, plans and options against a pass: drawn, judged, cut short, printed as a test, and kept.

What tests that were printed are written with; :mod:`pytest_fxbucket.fuzz.strategies` has what hypothesis draws.
"""

from pytest_fxbucket.fuzz.judge import problem
from pytest_fxbucket.fuzz.program import Program
from pytest_fxbucket.fuzz.trial import Trial

__all__ = ["Program", "Trial", "problem"]
