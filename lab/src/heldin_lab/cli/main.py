"""The command line: `heldin-lab COMMAND ...`, built like that of heldin (`heldin.cli.main`)."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module

from heldin import __version__
from heldin.errors import HeldinError

__all__ = ["main"]

DESCRIPTION = "The experiments, studies and measurements behind heldin."
COMMANDS = {  # name: the module that defines the command, and what it does
    "reproduce": (".reproduce", "Run the paper's experiments; a report."),
    "study": (".study", "Train many small models; which stopping rule keeps better ones?"),
    "bench": (".bench", "Time training steps with and without observation."),
    "zoo": (".zoo", "Observe models of other libraries; is what is seen true?"),
    "loops": (
        ".loops",
        "Train in other people's ways; are estimates exact, is training as without?",
    ),
    "data": (".reproduce", "Fetch the paper's datasets from their official places."),
}


def parser(only: str | None = None) -> ArgumentParser:
    """Return the parser of all commands; with `only`, a single command gets its arguments."""
    top = ArgumentParser(prog="heldin-lab", description=DESCRIPTION)
    top.add_argument("--version", action="version", version=f"heldin {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what, description=what)
        if only in (name, None):
            getattr(import_module(module, __package__), name)(command)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; print a `HeldinError` as one line on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = parser(next((word for word in words if word[:1] != "-"), "")).parse_args(words)
        code: int = options.run(options)
        return code
    except HeldinError as error:
        print(f"heldin-lab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print(f"heldin-lab: interrupted {interrupt}".rstrip(), file=sys.stderr)
        return 130
