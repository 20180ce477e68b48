"""Draw how a batch flows through the code: python -m heldin_lab.figures.batch_flow.

Names are places in src/heldin; a test compares.
"""

from __future__ import annotations

from html import escape

from heldin_lab.figures import IMAGES

COLUMNS = [
    (
        "model(x)",
        "forward pass, in capture/",
        [
            ("forward.py", "counts samples, knows shapes"),
            ("ownership/tracker.py", "follows a pass that is new"),
            ("ownership/planes.py", "who owns each element"),
            ("ownership/flow.py", "what each family of ops does"),
        ],
    ),
    (
        "loss.backward()",
        "backward pass, in capture/",
        [
            ("backward.py", "the one change to PyTorch"),
            ("graph.py", "the nodes down to the leaves"),
            ("planning.py", "where parameters meet data"),
            ("passes.py", "one pass, with hooks on the uses"),
            ("sampling.py", "which coordinates are looked at"),
            ("ops/generic.py", "contributions, op by op"),
            ("contributions.py", "summed and squared"),
        ],
    ),
    (
        "stopping.step()",
        "by evidence",
        [
            ("capture/moments.py", "sums to ratios f"),
            ("criterion/evidence.py", "ratios to the criterion"),
            ("criterion/running.py", "several steps put together"),
            ("criterion/average.py", "smoothing"),
            ("rules/evidence.py", "arming, patience, state"),
            ("rules/elementwise.py", "the same for single weights"),
        ],
    ),
    (
        "optimizer.step()",
        "by an estimated test loss",
        [
            ("rules/path.py", "checks, best weights"),
            ("rules/folds.py", "shadow models"),
            ("shadows/stack.py", "... held here, run by engines"),
            ("rules/leave_one_out.py", "... or followed to first order"),
            ("rules/policy.py", "when to look, when to give up"),
            ("rules/auto.py", "which of them"),
        ],
    ),
]
STYLE = (
    ".bg{fill:#fff}.col{fill:#f2f5fb;stroke:#c3cede}.head{fill:#30497f}"
    ".h{fill:#fff;font:600 14px ui-monospace,monospace}.s{fill:#33415c;font-size:12px}"
    ".file{fill:#fff;stroke:#c3cede}.n{fill:#1c2430;font:600 11px ui-monospace,monospace}"
    ".w{fill:#4a5568;font-size:11px}.a{fill:none;stroke:#30497f;stroke-width:2}"
)
WIDE, HIGH, STEP, TOP = 212, 36, 46, 68


def picture() -> str:
    """The picture, as SVG."""
    words = "; ".join(
        f"{call} ({kind}): " + ", ".join(f"{name} {what}" for name, what in files)
        for call, kind, files in COLUMNS
    )
    height = TOP + STEP * max(len(files) for _, _, files in COLUMNS) + 12
    width = 24 + 240 * len(COLUMNS) - 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-labelledby="t d" font-family="system-ui, sans-serif">',
        '<title id="t">How a batch flows through the code</title>',
        f'<desc id="d">Four columns, left to right. {escape(words)}.</desc>',
        f"<style>{STYLE}</style>",
        '<defs><marker id="m" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0L8,4L0,8z" fill="#30497f"/></marker></defs>',
        f'<rect class="bg" width="{width}" height="{height}"/>',
    ]
    for number, (call, kind, files) in enumerate(COLUMNS):
        x = 12 + 240 * number
        middle = x + WIDE / 2
        parts += [
            f'<rect class="col" x="{x}" y="10" width="{WIDE}" height="{height - 20}" rx="8"/>',
            f'<rect class="head" x="{x}" y="10" width="{WIDE}" height="30" rx="8"/>',
            f'<text class="h" x="{middle}" y="30" text-anchor="middle">{call}</text>',
            f'<text class="s" x="{middle}" y="57" text-anchor="middle">{kind}</text>',
        ]
        for place, (name, what) in enumerate(files):
            y = TOP + STEP * place
            parts += [
                f'<rect class="file" x="{x + 8}" y="{y}" width="{WIDE - 16}" height="{HIGH}" '
                'rx="5"/>',
                f'<text class="n" x="{x + 16}" y="{y + 15}">{name}</text>',
                f'<text class="w" x="{x + 16}" y="{y + 29}">{what}</text>',
            ]
            if place:
                parts.append(
                    f'<path class="a" d="M{middle},{y - STEP + HIGH}V{y - 1}" '
                    'marker-end="url(#m)"/>'
                )
        if number:
            parts.append(f'<path class="a" d="M{x - 28},25H{x - 2}" marker-end="url(#m)"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (IMAGES / "batch-flow.svg").write_text(picture(), encoding="utf-8")
