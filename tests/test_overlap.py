import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tileops.overlap import overlaps_itself, refuse_overlap, shares_memory

DTYPES = st.sampled_from([torch.int8, torch.int16, torch.float32])


def touched(x):
    """Every byte address of ``x``, one element at a time."""
    base, size = x.data_ptr(), x.element_size()
    offsets = [0]
    for length, stride in zip(x.shape, x.stride(), strict=True):
        offsets = [o + i * stride for o in offsets for i in range(length)]
    return {base + o * size + byte for o in offsets for byte in range(size)}


@st.composite
def views(draw, storage):
    dtype = draw(DTYPES)
    typed = storage.view(dtype)
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    stride = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    reach = sum(max(n - 1, 0) * s for n, s in zip(shape, stride, strict=True)) + 1
    offset = draw(st.integers(0, max(0, typed.numel() - reach)))
    return typed.as_strided(shape, stride, offset)


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_agrees_with_the_set_of_bytes(data):
    storage = torch.zeros(512, dtype=torch.int8)
    a, b = data.draw(views(storage)), data.draw(views(storage))
    assert shares_memory(a, b) == shares_memory(b, a) == bool(touched(a) & touched(b))


def test_columns_of_one_matrix_do_not_overlap():
    matrix = torch.zeros(4096, 4096)
    assert not shares_memory(matrix[:, :2048], matrix[:, 2048:])
    assert shares_memory(matrix[:, :2049], matrix[:, 2048:])
    assert not shares_memory(matrix[0::2], matrix[1::2])
    assert not shares_memory(matrix, torch.zeros(4096, 4096))
    assert not shares_memory(matrix[:0], matrix)


@pytest.mark.parametrize("width", [1, 7, 8])
def test_unlike_strides(width):
    storage = torch.zeros(10_000)
    a = storage.as_strided((90, width), (100, 1), 0)
    b = storage.as_strided((60, 8), (150, 1), 17)
    assert shares_memory(a, b) == bool(touched(a) & touched(b))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_view_that_overlaps_itself_is_found(data):
    x = data.draw(views(torch.zeros(512, dtype=torch.int8)))
    places = [0]
    for length, stride in zip(x.shape, x.stride(), strict=True):
        places = [p + i * stride for p in places for i in range(length)]
    assert overlaps_itself(x) == (len(set(places)) < len(places))


def test_an_output_that_overlaps_itself_is_refused():
    out = torch.empty(100).as_strided((5, 16), (3, 1))
    with pytest.raises(ValueError, match="SomeOp: out must not overlap itself, got shape"):
        refuse_overlap("SomeOp", "out", out)


def test_a_hard_case_ends():
    storage = torch.empty(2_000_000)
    a = storage.as_strided((64,) * 4, (60, 64, 68, 76))
    b = storage.as_strided((64,) * 4, (52, 56, 44, 48), 2)
    assert not shares_memory(a, b)  # all steps are multiples of four, and b starts at two
    assert shares_memory(a, storage.as_strided((64,) * 4, (52, 56, 44, 48), 4))
