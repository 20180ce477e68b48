"""States as JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heldin.state.packed import packed, unpacked

numbers = st.floats(width=32) | st.integers(-(2**60), 2**60) | st.booleans() | st.none() | st.text()
states = st.recursive(
    numbers,
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("abcdef"), inner),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(states)
def test_packed_states_are_json_and_come_back(state: Any) -> None:
    text = json.dumps(packed(state), allow_nan=False)
    assert repr(unpacked(json.loads(text))) == repr(state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_packed_tensors_keep_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (100 * torch.randn(shape, dtype=torch.float64)).to(dtype)
    back = unpacked(json.loads(json.dumps(packed(tensor), allow_nan=False)))
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
    if len(shape) == 2:
        assert torch.equal(unpacked(packed(tensor.T)), tensor.T)
    wild = torch.tensor([math.nan, math.inf, -math.inf, -0.0]).to(dtype)
    if dtype.is_floating_point:
        assert torch.equal(unpacked(packed(wild)).view(torch.uint8), wild.view(torch.uint8))
