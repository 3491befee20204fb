"""What ranks print is kept up to a limit, whatever they print, and what is left out is said."""

from __future__ import annotations

import pytest

from pytest_fxbucket.ranks.pool import RankFailure

JOBS = "suites.ranks.odd_jobs:"
WORLD = 2
LOG_BYTES, KEPT_BYTES = 16 << 20, 1 << 16
MOST = LOG_BYTES + KEPT_BYTES + 200


def test_a_loop_that_prints_for_ever_ends_at_its_limit_and_fills_no_disk(pools, tmp_path):
    pool = pools.get(WORLD)
    pool.start()
    with pytest.raises(RankFailure) as caught:
        pool.run(JOBS + "print_for_ever", [None] * WORLD, timeout_s=1, log_dir=tmp_path)
    assert caught.value.kind == "timeout"
    assert 0 < (tmp_path / "rank0.log").stat().st_size <= MOST


@pytest.mark.parametrize("backend", ["gloo", "local", "fake"])
def test_a_log_of_more_than_its_limit_has_its_beginning_and_its_end_and_says_so(pools, tmp_path, backend):
    printed = {}
    mebibytes = 20
    pool = pools.get(WORLD, backend)
    pool.run(JOBS + "print_much", [mebibytes] * WORLD, timeout_s=60, log_dir=tmp_path, on_output=printed.__setitem__)
    log = (tmp_path / "rank0.log").read_bytes()
    size = (mebibytes << 20) * (WORLD if backend == "fake" else 1)
    said = f"\n... ({size - LOG_BYTES - KEPT_BYTES:,} bytes left out: a log has the first 16 MiB and the end)\n"
    assert len(log) == LOG_BYTES + len(said) + KEPT_BYTES
    assert log[LOG_BYTES:].startswith(said.encode())
    assert log.startswith(b"mebibyte 0 ")
    assert log.endswith(b" mebibyte 19\n")
    assert printed[0].startswith("... (")
    assert printed[0].endswith(" mebibyte 19\n")


@pytest.mark.parametrize("backend", ["gloo", "local", "fake"])
def test_a_log_that_is_not_too_long_is_whole(pools, tmp_path, backend):
    printed = {}
    pool = pools.get(WORLD, backend)
    pool.run(JOBS + "print_lines", [3000] * WORLD, timeout_s=60, log_dir=tmp_path, on_output=printed.__setitem__)
    whole = "".join(f"line {number} {'x' * 90}\n" for number in range(3000))
    ranks = range(WORLD) if backend != "fake" else (0,)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        f"rank{rank}.log": whole * (WORLD if backend == "fake" else 1) for rank in ranks
    }
    said, _, kept = printed[0].partition("\n")
    assert whole.endswith(kept)
    assert said == f"... ({len(whole) * (WORLD if backend == 'fake' else 1) - len(kept):,} bytes before this are left out)"


@pytest.mark.parametrize("backend", ["gloo", "local"])
def test_a_message_of_50_mb_is_cut_and_says_so(pools, backend):
    pool = pools.get(WORLD, backend)
    with pytest.raises(RankFailure) as caught:
        pool.run(JOBS + "raise_at_length", [50_000_000] * WORLD, timeout_s=60)
    assert str(caught.value).startswith(f"rank {caught.value.rank} of 2 raised ValueError: xxx")
    assert "characters left out) ... xxx" in str(caught.value)
    assert sum(len(line) for line in caught.value.lines()) < 1 << 18


ODD = {
    "__str__ raises": "raised Odd: (its __str__ raised ZeroDivisionError)",
    "both raise": "raised Odd: (its __str__ raised RecursionError)",
    "no text": "raised Odd: (its __str__ raised TypeError)",
    "cannot be pickled": "raised Unsendable: 3",
    "sys.exit": "raised SystemExit",
    "sys.exit(0)": "raised SystemExit: 0",
    "KeyboardInterrupt": "raised KeyboardInterrupt",
    "group": "raised ExceptionGroup: several (2 sub-exceptions)",
}


@pytest.mark.parametrize(
    ("backend", "how"),
    [*(("local", how) for how in ODD), ("gloo", "both raise"), ("gloo", "KeyboardInterrupt"), ("fake", "KeyboardInterrupt")],
)
def test_every_exception_is_one_failure_whatever_it_does_when_asked(pools, backend, how):
    pool, said = pools.get(WORLD, backend), ODD[how]
    with pytest.raises(RankFailure) as caught:
        pool.run(JOBS + "raise_oddly", [how] * WORLD, timeout_s=30)
    assert caught.value.kind == "raised"
    assert f"rank {caught.value.rank} of 2 {said} (" in str(caught.value)
    assert "in raise_oddly" in caught.value.traceback
    assert "pytest_fxbucket" not in caught.value.traceback


def test_an_object_whose_repr_raises_or_is_long_is_no_result_and_is_named(pools):
    pool = pools.get(WORLD)
    with pytest.raises(RankFailure) as caught:
        pool.run(JOBS + "return_oddly", [None] * WORLD, timeout_s=30)
    assert "its result, of type Unsendable, cannot be pickled" in str(caught.value)
    assert len(str(caught.value)) < 1 << 13
