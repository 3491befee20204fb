"""Payloads and results arrive bit for bit."""

from __future__ import annotations

import pytest
import torch

from pytest_fxbucket.ranks import wire


def there_and_back(value):
    # As bytes, as over a socket.
    return wire.unpack([bytearray(buffer) for buffer in wire.pack(value)])


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.float8_e4m3fn, torch.uint16], ids=str)
def test_every_dtype_keeps_its_bits(dtype):
    tensor = torch.randint(0, 2, (3, 5)).to(dtype)
    back = there_and_back(tensor)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_nan_payloads_and_signed_zeros_survive():
    tensor = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000], dtype=torch.int32).view(torch.float32)
    assert torch.equal(there_and_back(tensor).view(torch.int32), tensor.view(torch.int32))


SHAPES = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", SHAPES)
def test_dense_shapes_keep_values_and_strides(name):
    tensor = SHAPES[name]
    back = there_and_back(tensor)
    assert torch.equal(back, tensor)
    assert back.stride() == tensor.stride()


@pytest.mark.parametrize("view", [torch.arange(10.0)[::3], torch.ones(1).expand(5), torch.arange(9.0).view(3, 3)[:, 1]])
def test_views_send_only_what_they_show(view):
    buffers = wire.pack(view)
    assert sum(memoryview(b).nbytes for b in buffers[1:]) == view.numel() * 4
    assert torch.equal(there_and_back(view), view)


def test_a_conjugated_view_arrives_as_its_values():
    value = torch.tensor([1 + 2j]).conj()
    assert torch.equal(there_and_back(value), value.resolve_conj())


def test_parameters_stay_parameters():
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    back = there_and_back([torch.nn.Parameter(torch.ones(2)), frozen, torch.ones(2, requires_grad=True)])
    assert [type(t) for t in back] == [torch.nn.Parameter, torch.nn.Parameter, torch.Tensor]
    assert [t.requires_grad for t in back] == [True, False, True]


def test_attributes_of_tensors_come_along():
    tagged = torch.nn.Parameter(torch.ones(2))
    tagged.tensor_parallel, tagged.tied = True, torch.zeros(1)
    back, again = there_and_back([tagged, tagged])
    assert back is again
    assert (type(back), back.tensor_parallel, back.tied.tolist()) == (torch.nn.Parameter, True, [0.0])


def test_what_arrives_is_a_copy():
    tensor = torch.zeros(3)
    back = there_and_back(tensor)
    back.add_(1)
    assert tensor.tolist() == [0, 0, 0]


def test_one_tensor_twice_is_sent_once():
    tensor = torch.zeros(3)
    first, second = there_and_back((tensor, tensor))
    assert first is second


def test_a_dict_of_tensors_survives():
    back = there_and_back({"a": torch.ones(2), "b": [torch.zeros(1), "text", None]})
    assert back["a"].tolist() == [1, 1]
    assert back["b"][1:] == ["text", None]


def test_a_lambda_is_named_as_the_reason():
    with pytest.raises(wire.Unpicklable, match="lambda"):
        wire.pack(lambda: None)
