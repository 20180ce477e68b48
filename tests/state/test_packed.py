"""States as one string."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heldin
from heldin.state import Packed

numbers = st.floats(width=32) | st.integers(-(2**60), 2**60) | st.booleans() | st.none() | st.text()
states = st.recursive(
    numbers,
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from("abcdef"), inner),
    max_leaves=8,
)


class Holder:
    """An object with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def through_a_string(state: Any) -> Any:
    """Return a state that went through one string, which JSON can hold."""
    text = json.dumps(Packed(Holder(state)).state_dict(), allow_nan=False)
    holder = Holder(None)
    Packed(holder).load_state_dict(json.loads(text))
    return holder.state


@settings(max_examples=50, deadline=None)
@given(states)
def test_packed_states_come_back(state: Any) -> None:
    assert repr(through_a_string(state)) == repr(state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_packed_tensors_keep_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (100 * torch.randn(shape, dtype=torch.float64)).to(dtype)
    back = through_a_string(tensor)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)
    if len(shape) == 2:
        assert torch.equal(through_a_string(tensor.T), tensor.T)
    wild = torch.tensor([math.nan, math.inf, -math.inf, -0.0]).to(dtype)
    if dtype.is_floating_point:
        assert torch.equal(through_a_string(wild).view(torch.uint8), wild.view(torch.uint8))


@pytest.mark.parametrize("state", [{}, {"packed": 3}, {"packed": "no state"}, {"packed": "AAAA"}])
def test_what_is_no_packed_state_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(heldin.HeldinError, match="not a packed state"):
        Packed(Holder(None)).load_state_dict(state)
