"""Options: each has an ini twin, and a value that cannot be is a usage error that names the flag."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pytest_fxbucket.pytest_plugin.options import TABLE, Options, close_bare_accept
from pytest_fxbucket.pytest_plugin.session import fx_session


def options_of(project: pytest.Pytester, *args: str) -> Options:
    return fx_session(project.parseconfigure(*args)).options


class TestBadValues:
    @pytest.mark.parametrize(
        ("args", "sentence"),
        [
            (["--fxbucket-plans=plnas"], "--fxbucket-plans: plnas is not there; did you mean plans?"),
            (
                ["--fxbucket-plans=plans/god.toml"],
                "--fxbucket-plans: plans/god.toml is not there; did you mean plans/good.toml?",
            ),
            (["--fxbucket-plans=none"], "--fxbucket-plans: no plan file (*.toml) in none"),
            (["--fxbucket-plans=plans/*.tml"], "--fxbucket-plans: no plan file (*.toml) in plans/*.tml"),
            (["--fxbucket-plans=tiny.py"], "--fxbucket-plans: tiny.py is no plan file; expected a *.toml"),
            (["--fxbucket-plans="], "--fxbucket-plans: no path given*"),
            (["--fxbucket-plans=plans/plain.toml", "--fxbucket-plans="], "--fxbucket-plans: no path given*"),
            (["--fxbucket-pass=manul"], '--fxbucket-pass: "manul" is no pass; expected *; did you mean "manual"?'),
            (["--fxbucket-pass=a.b"], '--fxbucket-pass: "a.b" is no pass; expected manual, torch or module:callable'),
            (["--fxbucket-accept=chnged"], "--fxbucket-accept: 'chnged' is no mode; expected *; did you mean changed?"),
            (["--fxbucket-backend=glo"], "--fxbucket-backend: 'glo' is no backend; expected *; did you mean gloo?"),
            (["-o", "fxbucket_require_gpus=maybe"], "ini fxbucket_require_gpus: *'maybe'; expected true or false"),
            (["-o", "fxbucket_backend=glo"], "ini fxbucket_backend: 'glo' is no backend*"),
            (["-o", "fxbucket_accept=x", "--fxbucket-accept"], "ini fxbucket_accept: 'x' is no mode*"),
            (["-o", "fxbucket_golden=../golden"], "ini fxbucket_golden: * lies outside rootdir *"),
            (["--fxbucket-accept", "--fxbucket-pass=torch"], "--fxbucket-accept with --fxbucket-pass=torch: goldens belong*"),
        ],
    )
    def test_a_bad_value_ends_pytest_with_4_and_one_sentence(
        self, project: pytest.Pytester, args: list[str], sentence: str
    ) -> None:
        project.mkdir("none")
        result = project.runpytest_inprocess(*args)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        # brackets are patterns to fnmatch, and none is meant
        result.stderr.fnmatch_lines([f"ERROR: {sentence}".replace("(*.toml)", "([*].toml)")])
        assert "Traceback" not in result.stderr.str()


def test_a_link_that_leads_nowhere_is_not_told_as_its_own_nearest_name(project: pytest.Pytester) -> None:
    Path("plans/loop.toml").symlink_to("loop.toml")
    result = project.runpytest_inprocess("--fxbucket-plans=plans/loop.toml")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --fxbucket-plans: plans/loop.toml is a link that leads nowhere"])


class TestTwins:
    def test_every_option_has_an_ini_twin_in_the_help(self, project: pytest.Pytester) -> None:
        text = project.runpytest_inprocess("--help").stdout.str()
        for row in TABLE:
            assert row.dest in text
            assert row.metavar is None or row.flag in text

    def test_ini_values_are_used_where_no_option_is_given(self, project: pytest.Pytester) -> None:
        project.makeini(
            "[pytest]\nfxbucket_plans = plans/good.toml\nfxbucket_pass = torch\n"
            "fxbucket_backend = fake\nfxbucket_golden = reviewed\nfxbucket_require_gpus = true\n"
        )
        assert options_of(project) == Options(
            rootdir=project.path,
            artifacts=project.path / ".fxbucket",
            plans=(project.path / "plans" / "good.toml",),
            pass_name="torch",
            backend="fake",
            require_gpus=True,
            golden_dir=project.path / "reviewed",
        )

    def test_an_option_wins_over_its_ini_twin(self, project: pytest.Pytester) -> None:
        project.makeini("[pytest]\nfxbucket_plans = plans/good.toml\nfxbucket_pass = torch\nfxbucket_backend = fake\n")
        args = ("--fxbucket-plans=plans/plain.toml", "--fxbucket-pass=a.b:c", "--fxbucket-backend=gloo")
        options = options_of(project, *args)
        assert (options.plans, options.pass_name, options.backend) == (
            (project.path / "plans" / "plain.toml",),
            "a.b:c",
            "gloo",
        )

    @pytest.mark.parametrize("backend", ["auto", "gloo", "gloo:cuda", "nccl", "local", "fake"])
    def test_every_back_end_can_be_named(self, project: pytest.Pytester, backend: str) -> None:
        assert options_of(project, f"--fxbucket-backend={backend}").backend == backend

    @pytest.mark.parametrize(("args", "required"), [((), False), (("--fxbucket-require-gpus", "plans/good.toml"), True)])
    def test_a_switch_takes_no_value(self, project: pytest.Pytester, args: tuple[str, ...], required: bool) -> None:
        config = project.parseconfigure(*args)
        assert fx_session(config).options.require_gpus is required
        assert not required or config.args == ["plans/good.toml"]


class TestPlans:
    @pytest.mark.parametrize(
        ("value", "names"),
        [
            ("plans/good.toml", ["good.toml"]),
            ("plans", ["broken.toml", "good.toml", "plain.toml"]),
            ("plans/p*.toml", ["plain.toml"]),
            ("**/g*.toml", ["good.toml"]),
            ("plans/plain.toml,plans", ["plain.toml", "broken.toml", "good.toml"]),
        ],
    )
    def test_files_folders_globs_and_commas_each_name_plans_once(
        self, project: pytest.Pytester, value: str, names: list[str]
    ) -> None:
        assert [path.name for path in options_of(project, f"--fxbucket-plans={value}").plans] == names

    @pytest.mark.parametrize(
        "first", [("--fxbucket-plans=plans/plain.toml",), ("-o", "addopts=--fxbucket-plans=plans/plain.toml")]
    )
    def test_the_option_twice_names_the_plans_of_both(self, project: pytest.Pytester, first: tuple[str, ...]) -> None:
        """Also where one is in addopts, which pytest puts before the command line."""
        twice = options_of(project, *first, "--fxbucket-plans=plans/good.toml,plans/plain.toml")
        assert [path.name for path in twice.plans] == ["plain.toml", "good.toml"]

    def test_paths_are_those_of_the_folder_that_pytest_was_started_in(
        self, project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(project.path / "plans")
        assert options_of(project, "--fxbucket-plans=good.toml").plans == (project.path / "plans" / "good.toml",)

    def test_a_glob_is_read_as_written_in_a_folder_whose_own_name_has_brackets(
        self, project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        project.mkdir("odd[1]")
        (project.path / "plans").rename(project.path / "odd[1]/plans")
        monkeypatch.chdir(project.path / "odd[1]")
        found = options_of(project, "--fxbucket-plans=plans/p*.toml").plans
        assert found == (project.path / "odd[1]/plans/plain.toml",)


class TestAccept:
    @pytest.mark.parametrize(
        ("args", "mode"),
        [
            ((), None),
            (("--fxbucket-accept",), "all"),
            (("--fxbucket-accept=new",), "new"),
            (("--accept",), "all"),
            (("--accept=changed",), "changed"),
            (("--fxbucket-accept", "-o", "fxbucket_accept=new"), "new"),
            (("-o", "fxbucket_accept=new"), None),
        ],
    )
    def test_mode(self, project: pytest.Pytester, args: tuple[str, ...], mode: str | None) -> None:
        assert options_of(project, *args).accept == mode

    @pytest.mark.parametrize("flag", ["--fxbucket-accept", "--accept"])
    def test_a_bare_accept_never_eats_the_path_after_it(self, project: pytest.Pytester, flag: str) -> None:
        config = project.parseconfigure(flag, "plans/plain.toml")
        assert config.args == ["plans/plain.toml"]

    def test_what_comes_after_two_dashes_is_left_alone(self) -> None:
        args = ["--fxbucket-accept", "--", "--fxbucket-accept"]
        assert close_bare_accept(args)
        assert args == ["--fxbucket-accept=", "--", "--fxbucket-accept"]

    @pytest.mark.parametrize("owner", ["conftest", "other_plugin"])
    def test_an_accept_option_of_somebody_else_stays_theirs(self, project: pytest.Pytester, owner: str) -> None:
        Path(f"{owner}.py").write_text("def pytest_addoption(parser): parser.addoption('--accept', action='store_true')")
        loading = [] if owner == "conftest" else ["-p", owner]
        project.syspathinsert()
        config = project.parseconfigure(*loading, "--accept", "plans/plain.toml")
        assert config.option.accept is True
        assert fx_session(config).options.accept is None


# --fxbucket-report: what would fail when the run ends is refused when it begins.


def refused(project: pytest.Pytester, *args: str) -> str:
    result = project.runpytest_inprocess(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "Traceback" not in result.stderr.str()
    (line,) = (line for line in result.errlines if line.startswith("ERROR: "))
    return line.removeprefix("ERROR: ")


def test_an_option_is_meant_from_where_pytest_was_started(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of(project).report is None
    monkeypatch.chdir(project.path / "plans")
    assert options_of(project, "--fxbucket-report=../pages/new").report == project.path / "pages" / "new"
    assert not (project.path / "pages").exists()


def test_the_ini_twin_is_meant_from_its_folder(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    project.makeini("[pytest]\nfxbucket_report = pages\n")
    monkeypatch.chdir(project.path / "plans")
    assert options_of(project).report == project.path / "pages"
    assert options_of(project, f"--rootdir={project.path / 'plans'}").report == project.path / "pages"
    assert options_of(project, "--fxbucket-report=here").report == project.path / "plans" / "here"


def test_a_file_is_no_folder_nor_is_nothing(project: pytest.Pytester) -> None:
    (project.path / "taken").write_text("mine")
    wanted = f"--fxbucket-report: {project.path}/taken is a file; expected a folder, or nothing yet"
    assert refused(project, "--fxbucket-report=taken/deeper/still") == wanted
    assert (project.path / "taken").read_text() == "mine"
    assert refused(project, "--fxbucket-report=").startswith("--fxbucket-report: no folder given; expected where")


def test_a_folder_that_may_not_be_written_to(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so that here the system's answer is given for it."""
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != project.path)
    wanted = f"--fxbucket-report: {project.path} may not be written to; expected a folder that may"
    assert refused(project, "--fxbucket-report=pages") == wanted


def test_without_plotly_the_run_does_not_begin(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)  # as an import sees a module that is not there
    assert refused(project, "-o", "fxbucket_report=pages") == (
        "ini fxbucket_report: a report needs plotly, which is not installed; install it with "
        "pip install 'pytest-fxbucket[report]'"
    )
