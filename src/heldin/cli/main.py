"""The command line: `heldin COMMAND ...`.

A command is a function that takes a sub-parser and gives it arguments and `run=`, a function of
the parsed arguments. It joins by one line in `COMMANDS`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence

from heldin.errors import HeldinError

from .bench import bench
from .fit import fit, predict
from .reproduce import data, reproduce
from .study import study

__all__ = ["main"]

COMMANDS: dict[str, Callable[[ArgumentParser], None]] = {
    "bench": bench,
    "fit": fit,
    "predict": predict,
    "study": study,
    "reproduce": reproduce,
    "data": data,
}


def parser() -> ArgumentParser:
    """The parser of all commands."""
    top = ArgumentParser(prog="heldin", description="Early stopping without a validation set.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add in COMMANDS.items():
        first = (add.__doc__ or "").splitlines()[0]
        add(commands.add_parser(name, help=first, description=first))
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; errors that heldin raises on purpose are one line on stderr."""
    options = parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        return code
    except HeldinError as error:
        print(f"heldin: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"heldin: interrupted {interrupt}".rstrip(), file=sys.stderr)
        return 130
