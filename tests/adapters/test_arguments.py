"""Arguments of callbacks are checked by name and by type."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from heldin.adapters.arguments import check_type, strict_kwargs
from heldin.errors import HeldinError


class Callback:
    @strict_kwargs()
    def __init__(self, early_stopping_patience: int = 1, smoothing: float = 0.9) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"patience": 5},
            "Callback: unknown argument 'patience'; is it 'early_stopping_patience'?",
        ),
        ({"model": None}, "Callback: the model is the one that the framework trains"),
        ({"zzz": 1}, "unknown argument 'zzz'; known are early_stopping_patience, smoothing"),
    ],
)
def test_an_unknown_argument_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(HeldinError) as caught:
        Callback(**wrong)
    assert message in str(caught.value)


def test_an_object_of_another_type_is_refused() -> None:
    with pytest.raises(HeldinError) as caught:
        check_type("EvidenceStopping", "model", 3, nn.Module, "the model that is trained")
    message = "EvidenceStopping: model must be the model that is trained, got an object of type int"
    assert str(caught.value) == message
