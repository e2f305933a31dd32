"""How long the dashboard takes to open a very long run.

    python benchmarks/dashboard.py --groups 100000 --json dashboard.json

Makes a run directory of that many groups (see `long_run.py`), then starts `dora-rl dashboard`
as a user would, and measures from the start of the process: until the page's files are answered,
until the overview has the whole log, and how long each view takes after that. With a Chromium and
`playwright` installed the page itself is opened too, and timed from the command to the figures on
the screen. Nothing is cached between two openings; the operating system's file cache is warm.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from long_run import write_long_run

DOCUMENTS = {
    "overview": "overview",
    "timeline, whole run": "timeline?width=1200",
    "timeline, one step": "timeline?begin=1000&end=1004&width=1200",
    "learning": "metrics",
    "distributions": "distributions",
    "throughput": "throughput",
    "groups, a page": "groups?order=longest&size=50",
    "one group": "group?group=77777",
    "one trajectory": "trajectory?group=77777&sample=3",
}
FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"


def start(run: Path) -> tuple[subprocess.Popen[str], str, float]:
    """The command, its address, and when it was started."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "dora_rl.cli", "dashboard", str(run), "--no-open"]
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, next(word for word in line.split() if word.startswith("http")), began


def get(address: str, name: str) -> Any:
    with urllib.request.urlopen(address + name) as answer:
        return json.loads(answer.read())


def over_http(run: Path) -> dict[str, float]:
    process, address, began = start(run)
    try:
        urllib.request.urlopen(address).read()
        figures = {"page answered": time.perf_counter() - began}
        while get(address, "api/overview")["share_read"] < 1.0:
            time.sleep(0.2)
        figures["whole log read"] = time.perf_counter() - began
        for label, name in DOCUMENTS.items():
            asked = time.perf_counter()
            get(address, f"api/{name}")
            figures[label] = time.perf_counter() - asked
    finally:
        process.terminate()
        process.wait()
    return figures


def in_browser(run: Path, chromium: str) -> float:
    """From the command to the whole overview on the screen, the browser already running."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=FLAGS.split())
        page = browser.new_page()
        process, address, began = start(run)
        try:
            page.goto(address)
            page.wait_for_selector('body[data-view="overview"][data-read="all"]')
            return time.perf_counter() - began
        finally:
            process.terminate()
            process.wait()
            browser.close()


def can_browse() -> str | None:
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return None
    return shutil.which("chromium") or shutil.which("chromium-browser")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", type=Path, help="use (and keep) this run directory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = args.run or Path(folder) / "long"
        if not run.is_dir():
            print(f"made {write_long_run(run, args.groups)} groups", flush=True)
        size = sum(path.stat().st_size for path in (run / "events").iterdir())
        rounds = [over_http(run) for _ in range(args.repeats)]
        median = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
        chromium = can_browse()
        if chromium is not None:
            times = [in_browser(run, chromium) for _ in range(args.repeats)]
            median["in Chromium, command to figures"] = statistics.median(times)
    print(f"event log {size / 1e6:.0f} MB; median of {args.repeats}")
    for name, seconds in median.items():
        print(f"  {name:34} {seconds:7.3f} s")
    if args.json is not None:
        args.json.write_text(json.dumps({"log_bytes": size, "seconds": median}, indent=1) + "\n")


if __name__ == "__main__":
    main()
