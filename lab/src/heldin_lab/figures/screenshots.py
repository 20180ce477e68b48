"""Screenshots of the built site and of the interactive page, on a desktop and on a phone.

    make docs; python -m heldin_lab.figures.screenshots [--site site] [--out FOLDER]

Needs playwright and Chromium. Look at them: tests see that nothing is cut off, not that it is good.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

PAGES = [
    "index.html",
    "faq.html",
    "coming-from.html",
    "when-it-goes-wrong.html",
    "api.html",
    "interactive.html",
]
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


def main(arguments: list[str] | None = None) -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=Path, default=Path("site"))
    parser.add_argument("--out", type=Path, default=Path("out/screenshots"))
    parser.add_argument("pages", nargs="*", default=PAGES)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    with sync_playwright() as started:
        running = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for size, (width, height) in SIZES.items():
            page = running.new_page(viewport={"width": width, "height": height})
            for name in options.pages:
                page.goto((options.site / name).resolve().as_uri())
                if name == "interactive.html":
                    page.wait_for_function("heldin.toy.done", timeout=120_000)
                path = options.out / f"{size}-{Path(name).stem}.png"
                page.screenshot(path=path, full_page=name == "interactive.html")
                print(path)
        running.close()


if __name__ == "__main__":
    main()
