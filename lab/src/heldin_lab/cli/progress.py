"""How far a command has come, on stderr."""

import sys

__all__ = ["tell"]


def tell(line: str) -> None:
    """Say one thing, at once."""
    print(line, file=sys.stderr, flush=True)
