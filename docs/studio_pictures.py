"""Pictures of docs/studio.md: `python docs/studio_pictures.py RUN SOURCE` opens the studio in chromium and writes them.

Needs Playwright and chromium.
"""

from __future__ import annotations

import argparse
import io
import threading
import time
from pathlib import Path
from urllib.parse import urlencode

import uvicorn
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from transduce.studio.app import create_app
from transduce.studio.runs import Studio, open_runs

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
# Name, view, other parameters of its address, theme, width and height.
PICTURES = (
    ("studio-alignment", "alignment", {}, "light", 1280, 960),
    ("studio-compare", "compare", {"first": "integrated_gradients", "second": "occlusion"}, "light", 1280, 1660),
    ("studio-what-if", "what-if", {}, "dark", 1280, 960),
    ("studio-beam", "beam", {}, "light", 1280, 1240),
    ("studio-image", "image", {"step": "2"}, "light", 1280, 1400),
    ("studio-steps", "steps", {"step": "6"}, "light", 400, 1100),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python docs/studio_pictures.py", description=__doc__)
    parser.add_argument("run")
    parser.add_argument("source")
    parser.add_argument("--views", nargs="+", default=sorted({view for _, view, *_ in PICTURES} - {"image"}))
    parser.add_argument("--edited", default="", help="the edited source of the view of changes")
    parser.add_argument("--port", type=int, default=8798)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "pictures")
    args = parser.parse_args()
    app = create_app(Studio(open_runs([args.run])))
    server = uvicorn.Server(uvicorn.Config(app, port=args.port, log_level="error", lifespan="off"))
    threading.Thread(target=server.run, daemon=True).start()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=list(FLAGS))
        for name, view, params, theme, width, height in PICTURES:
            if view not in args.views:
                continue
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
            query = {"source": args.source, **params, **({"edited": args.edited} if view == "what-if" else {})}
            page.goto(f"http://127.0.0.1:{args.port}/#/{view}?{urlencode(query)}")
            page.wait_for_selector("main section", timeout=120_000)
            expect(page.locator("[aria-busy=true]")).to_have_count(0, timeout=120_000)
            time.sleep(0.3)  # the transition of an answer
            picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
            picture.save(args.output / f"{name}.png", optimize=True)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
