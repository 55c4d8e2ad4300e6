"""Time of large attention maps in the studio: from the request to the painted map, in a browser.

`python -m benchmarks.studio_maps` writes benchmarks/results/studio-maps.json. Needs Playwright and chromium.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import APIRouter, FastAPI, Response
from playwright.sync_api import Page, sync_playwright

from transduce.studio import app as studio_app
from transduce.studio.runs import Studio

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
TEXT = "a"


def application(sizes: dict[str, np.ndarray]) -> FastAPI:
    """The studio with maps of random weights: the source of a request names the map."""
    routes = APIRouter()

    @routes.get("/runs")
    def runs() -> dict[str, Any]:
        known = {"shape": "encoder-decoder", "modality": "text", "generates": True, "parameters": 0, "parts": {}}
        return {"runs": [{"name": "maps", **known, "methods": ["attention"], "examples": []}], "gold": False}

    @routes.get("/explanation")
    def explanation(source: str) -> dict[str, Any]:
        size = len(sizes[source])
        empty: dict[str, Any] = {"source": source, "output": "", "forced": False, "score": 0, "nbest": []}
        tokens = {"source_tokens": [TEXT] * 50, "target_tokens": [TEXT] * 50, "token_scores": [0] * 50}
        return {**empty, **tokens, "kinds": {"cross": [1, 1, size, size]}}

    @routes.get("/map")
    def attention_map(source: str) -> dict[str, Any]:
        names = [TEXT] * len(sizes[source])
        largest = float(sizes[source].max())
        about = {"largest": largest, "signed": False, "method": "attention", "reading": ""}
        return {"rows": names, "columns": names, "weights": None, **about}

    @routes.get("/map/tile")
    def tile(source: str, top: int, left: int, size: int) -> Response:
        part = np.ascontiguousarray(sizes[source][top : top + size, left : left + size], "<f4")
        return Response(part.tobytes(), media_type="application/octet-stream")

    app = FastAPI()
    app.include_router(routes, prefix="/api")
    app.mount("/", studio_app.create_app(Studio({})))
    return app


def painted(page: Page, url: str, size: int) -> float:
    """Seconds until the tiles in sight are painted and the row under the pointer is shown."""
    page.goto("about:blank")
    begin = time.perf_counter()
    page.goto(f"{url}/#/alignment?run=maps&source={size}")
    page.locator("[data-testid=tile][data-drawn=true]").first.wait_for()
    page.get_by_test_id("canvas-map").hover(position={"x": 20, "y": 20})
    page.get_by_test_id("hovered-row").wait_for()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.studio_maps", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, default=8799)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/studio-maps.json"))
    args = parser.parse_args()
    draw = np.random.default_rng(1)
    maps = {str(size): draw.random((size, size), np.float32) for size in args.sizes}
    server = uvicorn.Server(uvicorn.Config(application(maps), port=args.port, log_level="error", lifespan="off"))
    threading.Thread(target=server.run, daemon=True).start()
    record = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.chromium, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        for size in args.sizes:
            times = [painted(page, f"http://127.0.0.1:{args.port}", size) for _ in range(args.repeats)]
            record[str(size)] = {"median_seconds": round(statistics.median(times), 3), "runs": args.repeats}
            print(f"{size} x {size}: {statistics.median(times):.2f} s")
        browser.close()
    args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
