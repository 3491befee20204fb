"""Reading goldens: a damaged file is never taken for a reviewed one."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pytest_fxbucket.errors import GoldenError
from pytest_fxbucket.golden.store import FORMAT, GoldenStore, render

BODY = "forward\n  gather layers.0  bf16\nbackward\n"


@pytest.fixture
def store(tmp_path: Path) -> GoldenStore:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "llama.toml").write_text('[[matrix]]\nid = "fp32"\n')
    (tmp_path / "golden" / "plans").mkdir(parents=True)
    return GoldenStore(tmp_path / "golden", tmp_path)


def golden_with(store: GoldenStore, data: bytes) -> Path:
    path = store.path_for(store.rootdir / "plans" / "llama.toml", None)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(("row", "name"), [(None, "llama.txt"), ("fp32", "llama.fp32.txt")])
def test_a_golden_lies_where_its_plan_does(store: GoldenStore, row: str | None, name: str) -> None:
    assert store.path_for(store.rootdir / "plans" / "llama.toml", row) == store.root / "plans" / name


def test_what_was_rendered_is_read_back(store: GoldenStore) -> None:
    assert store.read(golden_with(store, render(BODY).encode())) == BODY


def test_a_checkout_with_windows_line_ends_is_the_same_golden(store: GoldenStore) -> None:
    assert store.read(golden_with(store, render(BODY).replace("\n", "\r\n").encode())) == BODY


def test_a_text_may_have_a_line_that_looks_like_a_merge(store: GoldenStore) -> None:
    body = "Buckets\n=======\n"
    assert store.read(golden_with(store, render(body).encode())) == body


def edited(text: str) -> str:
    return text.replace("layers.0", "layers.1")


def conflicting(text: str) -> str:
    return text.replace("forward\n", "<<<<<<< ours\nforward\n=======\nother\n>>>>>>> theirs\n")


DAMAGE = {
    "cut in the footer": (lambda text: text[:-4], "golden/plans/llama.txt is cut short"),
    "cut in the body": (lambda text: text[: len(text) // 2], "golden/plans/llama.txt is cut short"),
    "appended to": (lambda text: text + "mine\nmore\n", "llama.txt has text behind its last line, 'mine'; remove that, or"),
    "empty": (lambda text: "", "golden/plans/llama.txt is not a golden"),
    "edited by hand": (edited, "golden/plans/llama.txt is not what was accepted"),
    "merge conflict": (conflicting, "golden/plans/llama.txt has merge conflict markers"),
    "another file": (lambda text: "hello\n" + text, "golden/plans/llama.txt is not a golden"),
    "older format": (
        lambda text: text.replace(f"golden {FORMAT}", f"golden {FORMAT - 1}"),
        "which this version no longer reads",
    ),
    "a format of 5,000 digits": (lambda text: text.replace(f"golden {FORMAT}", "golden " + "9" * 5000), "is not a golden"),
    "newer format": (
        lambda text: text.replace(f"golden {FORMAT}", f"golden {FORMAT + 1}"),
        f"newer pytest-fxbucket (format {FORMAT + 1}",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_golden_is_one_sentence_that_names_it(store: GoldenStore, case: str) -> None:
    damage, sentence = DAMAGE[case]
    path = golden_with(store, damage(render(BODY)).encode())
    with pytest.raises(GoldenError) as caught:
        store.read(path)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_read_is_said_with_what_to_do(store: GoldenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.path_for(store.rootdir / "plans" / "llama.toml", None)

    def said(one: Path = path) -> str:
        with pytest.raises(GoldenError) as caught:
            store.read(one)
        return str(caught.value)

    path.mkdir()
    assert said() == "golden/plans/llama.txt is a folder, where a golden's file was expected; move it away"
    path.rmdir()
    path.write_text(render(BODY))
    assert said(path / "row.txt") == "golden/plans/llama.txt is a file, where a folder of goldens was expected; move it away"

    def refused(self: Path) -> bytes:  # as for anybody but root
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refused)
    assert said() == (
        "golden/plans/llama.txt cannot be read: Permission denied; make it readable first: chmod u+r golden/plans/llama.txt"
    )


def test_a_golden_in_another_encoding_is_refused(store: GoldenStore) -> None:
    path = golden_with(store, render(BODY).encode("utf-16"))
    with pytest.raises(GoldenError, match="is not UTF-8"):
        store.read(path)


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "with a byte order mark"])
def test_a_missing_golden_names_the_command_that_writes_it_and_no_other(store: GoldenStore, mark: str) -> None:
    plan = store.rootdir / "plans" / "llama.toml"
    plan.write_text(mark + plan.read_text(), encoding="utf-8")
    with pytest.raises(GoldenError) as base:
        store.read(store.path_for(plan, None))
    with pytest.raises(GoldenError) as row:
        store.read(store.path_for(plan, "fp32"))
    item = "plans/llama.toml::golden"
    assert str(base.value).endswith(f"pytest {item} --fxbucket-accept=new '--deselect={item}['")
    assert str(row.value).endswith(f"pytest '{item}[fp32]' --fxbucket-accept=new")


def test_a_plan_that_no_argument_of_pytest_can_name_is_accepted_by_an_expression(store: GoldenStore) -> None:
    plan = store.rootdir / "plans" / "llama[1].toml"
    plan.write_text((store.rootdir / "plans" / "llama.toml").read_text(), encoding="utf-8")
    base, row = (shlex.split(store.accept_command(store.path_for(plan, row))) for row in (None, "fp32"))
    assert base == [
        "pytest",
        "--fxbucket-plans=plans/llama[1].toml",
        "-k",
        "golden and not golden[",
        "--fxbucket-accept=changed",
    ]
    assert row == ["pytest", "--fxbucket-plans=plans/llama[1].toml", "-k", "golden[fp32]", "--fxbucket-accept=changed"]


def test_a_plan_without_matrix_is_accepted_by_its_name_alone(store: GoldenStore) -> None:
    plan = store.rootdir / "one.toml"
    plan.touch()
    command = store.accept_command(store.path_for(plan, None))
    assert command == "pytest one.toml::golden --fxbucket-accept=changed"


def test_two_plans_that_would_share_a_golden_are_both_named(store: GoldenStore) -> None:
    other = store.rootdir / "plans" / "llama.fp32.toml"
    other.touch()
    for plan, row in [(store.rootdir / "plans" / "llama.toml", "fp32"), (other, None)]:
        with pytest.raises(GoldenError, match=r"llama\.toml \(matrix row fp32\) and to plans/llama\.fp32\.toml"):
            store.path_for(plan, row)


def test_a_plan_outside_rootdir_has_no_golden(store: GoldenStore) -> None:
    with pytest.raises(GoldenError, match="outside rootdir"):
        store.path_for(store.rootdir.parent / "elsewhere.toml", None)


def test_the_whole_text_depends_on_the_body_alone() -> None:
    assert render(BODY) == render(BODY.rstrip("\n"))
    assert render(BODY).splitlines()[0] == f"# fxbucket golden {FORMAT}"
