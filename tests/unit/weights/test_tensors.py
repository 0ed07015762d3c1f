"""Tensors from numpy and torch, without a copy where there need be none."""

import numpy as np
import pytest
import torch

from ebbtide.errors import InvalidRequest
from ebbtide.weights import as_array, describe, named_tensor


def test_contiguous_arrays_are_viewed_and_not_copied() -> None:
    array = np.zeros((2, 3), "f4")
    tensor = named_tensor("w", array)
    array[1, 2] = 7
    assert as_array(tensor)[1, 2] == 7


@pytest.mark.parametrize("array", [np.arange(6, dtype=">f4"), np.arange(12, dtype="<f4")[::2], np.float32(1)])
def test_any_layout_of_numpy_becomes_little_endian_c_order(array: np.ndarray) -> None:
    tensor = named_tensor("w", array)
    assert (tensor.dtype, tensor.shape) == ("F32", np.shape(array))
    assert np.array_equal(as_array(tensor), array)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "F32"),
        (torch.float16, "F16"),
        (torch.bfloat16, "BF16"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
        (torch.bool, "BOOL"),
        (torch.int64, "I64"),
    ],
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 3)])
def test_torch_tensors_keep_their_bits(dtype: torch.dtype, name: str, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape).mul_(3).to(dtype)
    tensor = named_tensor("w", value)
    assert (tensor.dtype, tensor.shape) == (name, shape)
    bits = torch.frombuffer(bytearray(tensor.data), dtype=dtype) if tensor.data else torch.empty(0, dtype=dtype)
    assert torch.equal(bits.view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_parameters_and_transposed_torch_tensors_are_taken() -> None:
    value = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)).T
    assert np.array_equal(as_array(named_tensor("w", value)), value.detach().numpy())


def test_what_cannot_be_published_is_refused_by_the_tensors_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^w: .*complex64"):
        named_tensor("w", np.zeros(2, "c8"))
    with pytest.raises(InvalidRequest, match=r"^w: .*torch.complex64"):
        named_tensor("w", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(InvalidRequest, match=r"^w: .*widths differ"):
        named_tensor("w", np.zeros(2, "f4"), dtype="BF16")


def test_bytes_that_do_not_fill_the_shape_are_refused() -> None:
    from ebbtide.weights import NamedTensor

    short = NamedTensor(name="w", dtype="F32", shape=(3,), data=memoryview(bytes(8)))
    with pytest.raises(InvalidRequest, match="8 bytes do not fill"):
        describe(short)
