"""The command line: `heldin COMMAND ...`.

A command is a function that takes a sub-parser and gives it arguments and `run=`, a function of
the parsed arguments. It joins by one line in `COMMANDS`. Only the command that was asked for is
imported, so that `heldin --help` answers at once.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from heldin import __version__
from heldin.errors import HeldinError, did_you_mean

__all__ = ["main"]

OFFER = (
    "Train on every row, know when to stop, and know how good the model will be: without a "
    "validation set."
)
COMMANDS = {  # the module that has it, and what it does
    "demo": (".demo", "See it work: one table, with and without a validation set; a minute."),
    "fit": (".fit", "Train a model on all rows of a table, without a held-out part."),
    "predict": (".fit", "Predict rows with a model of `heldin fit`; CSV to stdout."),
}


def parser(only: str | None = None) -> ArgumentParser:
    """Return the parser; only the command `only`, or each if None, gets its arguments."""
    top = ArgumentParser(prog="heldin", description=OFFER)
    top.add_argument("--version", action="version", version=f"heldin {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what)
        if only in (name, None):
            getattr(import_module(module, __package__), name)(command)
    return top


def _check_options(top: ArgumentParser, command: str, words: Sequence[str]) -> None:
    """Refuse an unknown option, and name the one that is meant."""
    commands: Any = next(action.choices for action in top._actions if action.dest == "command")
    known = [*top._option_string_actions, *commands[command]._option_string_actions]
    for word in words[: words.index("--")] if "--" in words else words:
        name = word.partition("=")[0]
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            hint = did_you_mean(name, known) or f"heldin {command} --help lists the options"
            raise HeldinError(f"there is no option {name!r}; {hint}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; errors that heldin raises on purpose are one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = next((word for word in words if word[:1] != "-"), "")
    try:
        if command and command not in COMMANDS:
            names = ", ".join(COMMANDS)
            hint = did_you_mean(command, COMMANDS) or f"commands are {names}"
            raise HeldinError(f"there is no command {command!r}; {hint}")
        top = parser(command)
        if command:
            _check_options(top, command, words)
        options = top.parse_args(words)
        if not command:
            top.print_help()
            return 0
        options.words = words  # for messages that repeat the command
        code: int = options.run(options)
        return code
    except HeldinError as error:
        print(f"heldin: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"heldin: interrupted {interrupt}".rstrip(), file=sys.stderr)
        return 130
