"""The mark of tests that need other people's libraries."""

from __future__ import annotations

import pytest

from suites.zoo.libraries import FOLDER

installed = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="the libraries of the zoo are not installed: make zoo, or make suites, installs them"
)
