"""Whose frame an error names: installed code is the user's, wherever it lies; the standard library's is not."""

from __future__ import annotations

import runpy
import traceback
from pathlib import Path

import pytest

from pytest_fxbucket.user_frame import user_frame


@pytest.mark.parametrize(("folder", "is_named"), [("lib/site-packages/model", True), ("lib/json", False), ("model", True)])
def test_outside_an_environment_what_is_installed_lies_below_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, is_named: bool
) -> None:
    monkeypatch.setattr(traceback, "__file__", str(tmp_path / "lib" / "traceback.py"))
    code = tmp_path / folder / "code.py"
    code.parent.mkdir(parents=True)
    code.write_text("def fails():\n    raise ValueError('no')\n\n\nfails()\n")
    with pytest.raises(ValueError, match="no") as caught:
        runpy.run_path(str(code))
    assert user_frame(caught.value).endswith("code.py:2 in fails") == is_named
