"""Observations that open and close at the same time."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import heldin
from heldin.capture.collector import Collector


def test_one_may_be_collected_while_another_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector of garbage comes when it likes: in the middle of `attach`, too."""
    forgotten, other = heldin.observe(nn.Linear(2, 1)), heldin.observe(nn.Linear(2, 1))
    forgotten.__enter__()
    plain_open = Collector.open

    def open_late(self: Collector) -> None:
        forgotten.close()
        plain_open(self)

    monkeypatch.setattr(Collector, "open", open_late)
    opening = threading.Thread(target=other.__enter__, daemon=True)
    opening.start()
    opening.join(30)
    assert not opening.is_alive()
    other.close()
    assert torch.autograd.backward.__module__ == "torch.autograd"
