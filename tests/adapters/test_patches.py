"""Methods of a framework's objects are replaced, and put back."""

from __future__ import annotations

import pytest

from heldin.adapters.patches import MethodWrapper, Patches, replaced


class Greeter:
    def greet(self, name: str) -> str:
        if name == "nobody":
            raise KeyboardInterrupt
        return "hello " + name


def test_wrappers_are_closed_in_any_order() -> None:
    greeter = Greeter()
    loud = MethodWrapper(greeter, "greet", lambda greet, name: greet(name).upper())
    twice = MethodWrapper(greeter, "greet", lambda greet, name: 2 * greet(name))
    assert greeter.greet("you") == "HELLO YOUHELLO YOU"
    loud.close()
    assert greeter.greet("you") == "hello youhello you"
    twice.close()
    assert vars(greeter) == {}


def test_an_error_ends_the_run() -> None:
    greeter, ended = Greeter(), []
    patches = Patches(lambda: ended.append(True))
    patches.watch_methods(greeter, "greet", "no_method")
    assert greeter.greet("you") == "hello you"
    assert not ended
    with pytest.raises(KeyboardInterrupt):
        greeter.greet("nobody")
    assert ended == [True]
    patches.close()
    assert vars(greeter) == {}


def test_what_a_framework_ends_its_loop_by_is_no_error() -> None:
    greeter, ended = Greeter(), []
    patches = Patches(lambda: ended.append(True), (KeyboardInterrupt,))
    patches.watch_methods(greeter, "greet")
    with pytest.raises(KeyboardInterrupt):
        greeter.greet("nobody")
    assert not ended
    patches.close()


def test_replaced_attributes_come_back_after_an_error() -> None:
    greeter = Greeter()
    vars(greeter)["mood"] = "good"
    moods = []

    def fail() -> None:
        with replaced([(greeter, "mood", "bad"), (greeter, "greet", lambda name: "bye " + name)]):
            moods.append((vars(greeter)["mood"], greeter.greet("you")))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert moods == [("bad", "bye you")]
    assert vars(greeter) == {"mood": "good"}
    assert greeter.greet("you") == "hello you"
