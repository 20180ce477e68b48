"""The table of the zoo, by library."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .judge import STATUSES, Outcome

__all__ = ["table", "write_report"]

COLUMNS = ("exact", "refused", "warned", "wrong", "crashed", "changed")


def table(outcomes: Sequence[Outcome]) -> str:
    """How many models of each library went which way, and the reasons of those not exact."""
    ran = [o for o in outcomes if o.status != "broken"]
    libraries = sorted({(o.library, o.version) for o in ran}, key=lambda pair: pair[0].lower())
    lines = [f"| library | models | {' | '.join(COLUMNS)} |", "|---" + "|---:" * 7 + "|"]
    for library, version in libraries:
        mine = [o for o in ran if o.library == library]
        lines.append(f"| {library} {version} | {_counted(mine)} |")
    lines.append(f"| **{len(libraries)} libraries** | {_counted(ran)} |")
    own = [o for o in ran if not o.mixes]
    exact = sum(o.status == "exact" for o in own)
    share = exact / max(1, len(own))
    lines += ["", f"Of {len(own)} models with a gradient for each sample, {exact} are exact"]
    lines[-1] += f" ({share:.1%})."
    others = [o for o in ran if o.status != "exact"]
    if others:
        lines += ["", "| model | samples apart | outcome | reason |", "|---|---|---|---|"]
        for o in sorted(others, key=lambda o: (o.status, o.library, o.name)):
            apart = "no" if o.mixes else "yes"
            lines.append(f"| {o.library} {o.name} | {apart} | {o.status} | {_short(o.reason)} |")
    return "\n".join(lines)


def _counted(outcomes: Sequence[Outcome]) -> str:
    counts = [sum(o.status == status for o in outcomes) for status in COLUMNS]
    return " | ".join(map(str, [len(outcomes), *counts]))


def _short(reason: str, length: int = 160) -> str:
    text = reason.replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= length else text[:length].rsplit(" ", 1)[0] + " …"


def write_report(outcomes: Sequence[Outcome], out: Path) -> str:
    """Write `zoo.json` and `zoo.md`; the table."""
    text = table(outcomes)
    data = {"statuses": STATUSES, "outcomes": [o.as_dict() for o in outcomes]}
    (out / "zoo.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    (out / "zoo.md").write_text(text + "\n", encoding="utf-8")
    return text
