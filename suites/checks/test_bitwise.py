"""Bits are compared as bits, a difference is led to its place, and data that cannot tell is an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from pytest_fxbucket.checks.bitwise.job import BitwiseOutcome, TensorDifference, bits, compare, ulps_apart
from pytest_fxbucket.checks.bitwise.judge import (
    buckets_at_hand,
    difference_lines,
    differing_copies,
    differing_losses,
    first_node_lines,
    first_step,
    unusable_data,
    wrong_graphs,
)
from pytest_fxbucket.checks.bitwise.localise import FirstDifference
from pytest_fxbucket.checks.verdict import Verdict
from pytest_fxbucket.errors import RankError
from pytest_fxbucket.graph.buckets import Bucket, GraphAnalysis
from pytest_fxbucket.ranks.failure import RankFailure, RankState
from pytest_fxbucket.ranks.flight_recorder import RankPosition, RecordedGroup, RecordedLaunch
from suites.checks.launches_by_hand import gather

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
INTEGER_OF = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def from_bits(pattern: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([pattern], dtype=INTEGER_OF[dtype.itemsize]).view(dtype)


class TestBits:
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_signed_zeros_differ(self, dtype: torch.dtype) -> None:
        assert not torch.equal(bits(torch.tensor([0.0], dtype=dtype)), bits(torch.tensor([-0.0], dtype=dtype)))

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_nans_are_equal_by_their_payload_alone(self, dtype: torch.dtype) -> None:
        (nan,) = torch.tensor([float("nan")], dtype=dtype).view(INTEGER_OF[dtype.itemsize]).tolist()
        one, same, other = (from_bits(pattern, dtype) for pattern in (nan, nan, nan + 1))
        assert bool(other.isnan().all())
        assert torch.equal(bits(one), bits(same))
        assert not torch.equal(bits(one), bits(other))

    @pytest.mark.parametrize("shape", [(), (3,)])
    def test_tensors_of_two_devices_are_compared_on_the_first(self, shape: tuple[int, ...]) -> None:
        with FakeTensorMode():
            found = compare(0, 0, "state", "step", torch.ones(shape), torch.ones(shape, device="cuda"))
            with pytest.raises(DataDependentOutputException):  # as far as tensors without values go: whether any bit differs
                list(found)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64])
    def test_integers(self, dtype: torch.dtype) -> None:
        assert torch.equal(bits(torch.ones(3, dtype=dtype)), bits(torch.ones(3, dtype=dtype)))
        assert not torch.equal(bits(torch.ones(3, dtype=dtype)), bits(torch.zeros(3, dtype=dtype)))

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
    def test_complex_numbers_by_both_parts(self, dtype: torch.dtype) -> None:
        assert not torch.equal(
            bits(torch.tensor([1 + 0j], dtype=dtype)), bits(torch.tensor([1 - 0j], dtype=dtype).conj_physical())
        )

    def test_views_are_read_in_logical_order(self) -> None:
        matrix = torch.arange(6.0).reshape(2, 3)
        assert torch.equal(bits(matrix.t()), bits(matrix.t().contiguous()))

    def test_nothing_equals_nothing(self) -> None:
        assert bits(torch.empty(0)).numel() == 0
        assert ulps_apart(torch.empty(0), torch.empty(0)) == -1


class TestUlps:
    @pytest.mark.parametrize("dtype", FLOATS)
    def test_neighbours_are_one_apart_also_across_zero(self, dtype: torch.dtype) -> None:
        one, tiny = torch.tensor([1.0], dtype=dtype), from_bits(1, dtype)
        assert ulps_apart(one, from_bits(int(bits(one)) + 1, dtype)) == 1
        assert ulps_apart(torch.tensor([0.0], dtype=dtype), tiny) == 1
        assert ulps_apart(tiny, -tiny) == 2
        assert ulps_apart(torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype)) == 0

    def test_the_largest_distance_counts(self) -> None:
        a = torch.tensor([1.0, 2.0])
        assert ulps_apart(a, torch.tensor([1.0, 2.0 + 2**-20])) == 4

    def test_ends_of_float64_do_not_wrap(self) -> None:
        end = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
        assert ulps_apart(end, -end) == 2 * int(bits(end))

    def test_one_byte_floats_keep_their_order_across_zero(self) -> None:
        tiny = torch.tensor([1, -127], dtype=torch.int8).view(torch.float8_e4m3fn)
        assert ulps_apart(tiny[:1], tiny[1:]) == 2

    @pytest.mark.parametrize(
        ("a", "b"),
        [
            (torch.tensor([1]), torch.tensor([2])),
            (torch.tensor([1j]), torch.tensor([2j])),
            (torch.tensor([1.0]), torch.tensor([float("nan")])),
            (torch.tensor([float("nan")]), -torch.tensor([float("nan")])),
        ],
    )
    def test_no_distance_where_it_has_no_meaning(self, a: torch.Tensor, b: torch.Tensor) -> None:
        assert ulps_apart(a, b) == -1

    def test_nans_beside_numbers_do_not_hide_the_distance(self) -> None:
        nan = float("nan")
        assert ulps_apart(torch.tensor([nan, 1.0]), torch.tensor([nan, 1.0 + 2**-23])) == 1


def outcome(**values: Any) -> BitwiseOutcome:
    return BitwiseOutcome(**{"digests": ("u", "b"), "batches": ["x"], **values})


class TestJudging:
    def test_a_gradient_that_is_zero_on_every_rank_is_named(self) -> None:
        (line,) = unusable_data([outcome(zero=["a", "b"], batches=["x"]), outcome(zero=["b"], batches=["y"])])
        assert line.startswith("the gradient of b is zero on every rank in every step")

    def test_a_gradient_that_may_be_zero_is_no_reason_and_need_not_be(self) -> None:
        outcomes = [outcome(zero=["a", "b"], still=["a"]), outcome(zero=["a", "b"], still=["a"], batches=["y"])]
        assert unusable_data(outcomes, {"a", "b", "c"}) == []
        (line,) = unusable_data(outcomes, {"a", "c"})
        assert line.startswith("the gradient of b is zero on every rank in every step")
        assert line.endswith("name it in [model] may_be_idle")

    def test_what_may_be_idle_and_is_not_must_be_moved_by_its_optimizer(self) -> None:
        (line,) = unusable_data([outcome(still=["a"]), outcome(still=["a"], batches=["y"])], {"a"})
        assert line.startswith("the optimizer leaves a as it was on every rank in every step")

    def test_values_that_are_not_finite_on_one_rank_are_named(self) -> None:
        (line,) = unusable_data([outcome(), outcome(not_finite=["the loss"], batches=["y"])])
        assert line.startswith("the values of the loss are not finite")

    def test_equal_batches_in_one_step_are_said(self) -> None:
        (line,) = unusable_data([outcome(batches=["a", "c"]), outcome(batches=["b", "c"])])
        assert line.startswith("all ranks got the same batch in step 1")

    def test_equal_batches_are_said_though_each_has_parts_for_several_ranks(self) -> None:
        outcomes = [outcome(batches=[part]) for part in ("first", "second", "first", "second")]
        assert unusable_data(outcomes) == []
        (line,) = unusable_data(outcomes, reading=[[0, 2], [1, 3]])
        assert line.startswith("all ranks got the same batch in step 0")
        assert unusable_data([*outcomes[:3], outcome(batches=["another"])], reading=[[0, 2], [1, 3]]) == []
        assert unusable_data(outcomes, reading=[]) == []

    def test_good_data_says_nothing(self) -> None:
        assert unusable_data([outcome(batches=["a"], zero=["w"]), outcome(batches=["b"])]) == []

    @pytest.mark.parametrize("ran", [("u", "other"), ("other", "b")])
    def test_a_rank_that_ran_another_graph_is_named(self, ran: tuple[str, str]) -> None:
        assert wrong_graphs([outcome(), outcome(digests=ran)], [("u", "b")] * 2) == [
            "rank 1 ran another graph than the one that was checked"
        ]

    def test_the_first_step_is_shown_the_loss_first(self) -> None:
        late = TensorDifference(2, 0, "loss", "", 1, 1, 3)
        gradient = TensorDifference(1, 0, "gradient", "a.w", 2, 8, 5)
        loss = TensorDifference(1, 1, "loss", "", 1, 1, -1)
        outcomes = [outcome(differences=[late, gradient]), outcome(differences=[loss])]
        assert first_step(outcomes) == 1
        assert difference_lines(outcomes, {"a.w": "a"}) == [
            "step 1, rank 1: loss: 1 of 1 elements differ",
            "step 1, rank 0: gradient a.w (bucket a): 2 of 8 elements differ, up to 5 ULP",
        ]

    def test_many_differences_are_counted(self) -> None:
        many = [TensorDifference(0, 0, "gradient", f"w{i}", 1, 1, 1) for i in range(15)]
        assert difference_lines([outcome(differences=many)], {})[-1] == "... and 3 more tensors in step 0"

    def test_rank_0_is_named_where_it_is_not_the_first_that_holds_a_copy(self) -> None:
        outcomes = [outcome(parameter_digests={"w": "x"}, losses=["x"]), outcome(parameter_digests={"w": "y"}, losses=["y"])]
        assert differing_copies(outcomes, {"w": [[1, 0]]}) != []
        assert differing_losses(outcomes, [[1, 0]], is_placed=True) != []

    @pytest.mark.parametrize(
        ("names", "at", "said"),
        [
            (("0", "dp", "dp:gather"), (1, 2), "bucket c, forward"),
            (("0", "dp", "dp:gather"), (2, 2), "bucket d, forward"),
            (("",), (0, 2), "bucket b, forward"),
        ],
    )
    def test_the_bucket_at_hand_is_on_the_group_of_the_launch(
        self, names: tuple[str, ...], at: tuple[int, int], said: str
    ) -> None:
        buckets = [gather(fqn, place, group="dp:gather" if fqn in "bd" else "dp") for place, fqn in enumerate("abcd")]
        assert self.at_hand(buckets, names, at) == {1: said}

    def at_hand(self, buckets: list[Bucket], names: tuple[str, ...], at: tuple[int, int]) -> dict[int, str]:
        """The bucket of rank 1, which is at launch number ``at[1]`` of the recorded group ``at[0]``; all have two ranks."""
        groups = tuple(RecordedGroup((0, 1), 0, 0, name) for name in names)
        where = RankPosition("bucketed step 0", RecordedLaunch(at[0], 7, at[1], True, "all_gather", "", 0), groups=groups)
        failure = RankFailure("", "timeout", 1, (RankState(1, where=where),))
        reading = GraphAnalysis(tuple(buckets), (), (), 99)
        members = {"dp": (0, 1), "dp:gather": (0, 1)}
        return buckets_at_hand(failure, {1: [reading, reading]}, members, {}, ("unbucketed", "bucketed"))

    def test_the_first_node_is_that_of_the_rank_that_parts_first(self) -> None:
        outcomes = [
            outcome(),
            outcome(first=FirstDifference((9, "mm", "aten.mm"))),
            outcome(first=FirstDifference((4, "add", "aten.add"))),
        ]
        assert first_node_lines(outcomes) == [
            "first node whose bits differ: add (aten.add), node 4 of the bucketed graph, on rank 2"
        ]

    def test_where_no_node_parts_the_nodes_of_the_pass_are_named(self) -> None:
        assert first_node_lines([outcome(), outcome()]) == [
            "no node that both graphs have differs: the difference arises in nodes that the pass made"
        ]


class TestOnRanks:
    def test_a_model_that_memory_cannot_hold_is_refused_before_ranks_build_it(
        self, bitwise: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("pytest_fxbucket.checks.on_ranks.available_memory", lambda: 1000)
        with pytest.raises(RankError, match=r"mlp.toml: 2 ranks here would build 0\.0 GiB of parameters"):
            bitwise()

    def test_our_pass_is_the_same_program(self, bitwise: Callable[..., Verdict]) -> None:
        verdict = bitwise()
        assert verdict, repr(verdict)
        assert verdict.summary.startswith("loss, 4 gradients and parameters equal bit for bit on 2 ranks in 2 steps")

    def test_the_first_node_that_differs_is_named(self, bitwise: Callable[..., Verdict]) -> None:
        verdict = bitwise(settings={"pass_name": "bitwise_models:tanh_off_by_a_little"})
        assert verdict.outcome == "failed"
        assert re.fullmatch(
            r"first node whose bits differ: tanh \(aten\.tanh\.default\), node \d+ of the bucketed graph, on rank 0, 1",
            verdict.lines[-1],
        )
        assert re.match(r"step 0, rank 0: (loss|gradient)", verdict.lines[0])

    def test_memory_that_nobody_has_written_is_no_first_node(self, bitwise: Callable[..., Verdict]) -> None:
        drawing = {"factory": "bitwise_models:build_drawing"}
        verdict = bitwise(model=drawing, settings={"pass_name": "bitwise_models:tanh_off_by_a_little"})
        assert verdict.lines[-1].startswith("first node whose bits differ: tanh (aten.tanh.default), node ")

    def test_what_a_pass_took_out_is_named_where_no_node_differs(self, bitwise: Callable[..., Verdict]) -> None:
        drawing = {"factory": "bitwise_models:build_drawing"}
        verdict = bitwise(model=drawing, settings={"pass_name": "bitwise_models:lost_count"})
        assert verdict.lines[-1] == (
            "no node that both graphs have differs: the difference arises in nodes that the pass made, "
            "or since it took out add_ (aten.add_.Tensor)"
        )

    def test_nodes_of_the_pass_are_named_where_no_other_differs(self, bitwise: Callable[..., Verdict]) -> None:
        verdict = bitwise(settings={"pass_name": "bitwise_models:gradient_off_by_a_little"})
        assert verdict.outcome == "failed"
        assert verdict.lines[-1].startswith("no node that both graphs have differs")
