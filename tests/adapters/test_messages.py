"""Messages in a framework's run name no way out that its users do not have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from heldin import HeldinError
from tests.adapters import test_untouched
from tests.support import plain

pytestmark = plain.foreign
OF_PLAIN_LOOPS = ("clip=", "state=", "stopping.", "train_step=function", "make the stopping object")


def shrink(self: Any, tensors: Any) -> None:
    """Change a weight after a step, as callbacks do that clamp or average."""
    with torch.no_grad():
        next(iter(tensors)).mul_(0.9)


def expect_message(train: Callable[[bool], Any]) -> None:
    with pytest.raises(HeldinError, match=r"outside of optimizer\.step\(\) after step 1") as raised:
        train(True)
    message = str(raised.value)
    assert "leave out the callback, hook or option that does so, or use rule='evidence'" in message
    assert not [words for words in OF_PLAIN_LOOPS if words in message]


@pytest.mark.parametrize(
    ("framework", "arguments"),
    [
        ("lightning", ()),
        ("transformers", ("tmp_path",)),
        ("keras", (None,)),
        ("skorch", ()),
        ("fastai", (False,)),
        ("ignite", ()),
        ("accelerate", ()),
    ],
)
def test_of_weights_that_a_callback_changes(
    framework: str, arguments: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(test_untouched.Trace, "add", shrink)
    monkeypatch.setattr(test_untouched, "expect_same", expect_message)
    chosen = [tmp_path if each == "tmp_path" else each for each in arguments]
    getattr(test_untouched, f"test_{framework}")(*chosen)
