"""``module:callable`` names: found with the plan's folder first, and named when they are not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_fxbucket.plan import PlanError
from pytest_fxbucket.plan.factories import first_on_path, import_callable


def test_a_callable_is_found_in_the_folder_that_is_put_first(tmp_path: Path) -> None:
    (tmp_path / "factory_one.py").write_text("class Model:\n    @staticmethod\n    def tiny():\n        return 7\n")
    before = list(sys.path)
    with first_on_path([tmp_path]):
        assert import_callable("factory_one:Model.tiny", "W")() == 7
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("factory_gone:build", 'W: there is no module "factory_gone"'),
        ("factory_two:SIZE.bit_lenght", 'W: module "factory_two" has no "SIZE.bit_lenght"; did you mean "bit_length"?'),
        ("factory_two:biuld", 'W: module "factory_two" has no "biuld"; did you mean "build"?'),
        ("factory_two:SIZE", 'W: "factory_two:SIZE" is a int, which cannot be called'),
        ("factory_three:build", 'W: importing "factory_three" raised ZeroDivisionError: division by zero'),
        ("factory_four:build", "W: importing \"factory_four\" raised ModuleNotFoundError: No module named 'not_there'"),
    ],
)
def test_a_callable_that_cannot_be_had_is_one_sentence(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "factory_two.py").write_text("SIZE = 3\n\ndef build(): ...\n")
    (tmp_path / "factory_three.py").write_text("1 / 0\n")
    (tmp_path / "factory_four.py").write_text("import not_there\n")
    with first_on_path([tmp_path]), pytest.raises(PlanError) as caught:
        import_callable(name, "W")
    assert str(caught.value).startswith(says)
