"""The dashboard in a real Chromium: a run as it goes on and ends, every view, and a very long run.

What the page shows is compared with the event log, through the audit. Needs a Chromium on the path
and the `playwright` package (its own browsers are not used); skipped where either is missing.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core import events as ev
from dora_rl.observe.audit import AuditFigures, audit_run
from dora_rl.observe.eventlog import segments
from tests.kit.places import ROOT
from tests.kit.tiny_runs import finish, tiny_run, wait_until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update"
)
VIEWS = ("overview", "timeline", "learning", "distributions", "throughput", "config", "groups")
WAIT_MS = 60_000  # on a machine that is busy with other tests
LONG_RUN = runpy.run_path(str(ROOT / "benchmarks" / "long_run.py"))
write_long_run = LONG_RUN["write_long_run"]

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]


@contextmanager
def dashboard(run: Path, page: Any, *more: Path) -> Iterator[str]:
    """The command as a user starts it; gives its address. The page is left before it ends: what it
    asks for after that would be an error."""
    command = [
        sys.executable,
        "-m",
        "dora_rl.cli",
        "dashboard",
        *map(str, (run, *more)),
        "--no-open",
    ]
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        yield next(word for word in line.split() if word.startswith("http"))
        page.goto("about:blank")
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    profile = str(tmp_path_factory.mktemp("profile"))
    with api.sync_playwright() as play:
        context = play.chromium.launch_persistent_context(
            profile,
            executable_path=CHROMIUM,
            args=FLAGS.split(),
            viewport={"width": 1280, "height": 900},
        )
        yield context
        context.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh page on which any error of a script fails the test."""
    page = browser.new_page()
    page.set_default_timeout(WAIT_MS)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda line: line.type == "error" and errors.append(line.text))
    yield page
    page.close()
    assert errors == []


def open_view(page: Any, name: str) -> None:
    """Click its tab; wait until it is drawn from a whole log."""
    page.click(f'nav a[href="#{name}"]')
    page.wait_for_selector(f'body[data-view="{name}"][data-read="all"]')


def figure(page: Any, name: str) -> float:
    return float(page.get_attribute(f'[data-figure="{name}"]', "data-value"))


def check_overview(page: Any, figures: AuditFigures) -> None:
    assert figure(page, "tokens_trained") == figures.tokens_trained
    assert figure(page, "staleness_mean") == pytest.approx(figures.staleness_mean)
    assert figure(page, "staleness_max") == figures.staleness_max
    assert figure(page, "mixed") == figures.mixed_version_frac * figures.samples_trained
    assert figure(page, "discarded") == figures.groups_discarded
    assert figure(page, "migrations") == figures.migrations
    assert figure(page, "state_trained") == figures.groups_trained


GATED = """
import os, time
from dora_rl.data import chains

def reward(completion, answer):
    while not os.path.exists({gate!r}):
        time.sleep(0.05)
    return chains.reward(completion, answer)
"""


def test_a_live_run_to_its_end_and_every_view(page: Any, tmp_path: Path) -> None:
    gate, code = tmp_path / "gate", tmp_path / "gated.py"
    code.write_text(GATED.format(gate=str(gate)))
    run = tiny_run(
        tmp_path,
        orchestration__num_steps=4,
        data__eval=["dora_rl.data.tasks:Chains"],
        evaluation__num_prompts=8,
        reward__functions=[f"{code}:reward"],  # no step ends before the page is there
        reward__timeout_s=600.0,
    )
    process = run.start()
    try:
        wait_until("the first lines", lambda: len(segments(run.run_dir / "events")) > 0, process)
        with dashboard(run.run_dir, page) as address:
            page.goto(address)
            page.wait_for_selector("#status.live")
            wait_until("both instances", lambda: len(run.joined()) == 2, process)
            gate.touch()
            wait_until("the first step", lambda: bool(run.steps()), process)
            wait_until("a trained group", lambda: figure(page, "state_trained") > 0)
            shown = figure(page, "state_trained")
            now = audit_run(run.run_dir / "events").figures
            assert 0 < shown <= now.groups_trained
            finish(process)
            page.wait_for_selector("#status.finished")  # without a reload
            page.wait_for_selector('.verdict[data-state="whole"]')
            assert page.get_attribute(".verdict", "data-findings") == "0"
            figures = run.proven().figures
            check_overview(page, figures)
            check_views(page, run, figures)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def check_views(page: Any, run: Any, figures: AuditFigures) -> None:
    open_view(page, "timeline")
    canvas = page.locator(".timeline canvas").first
    samples = sum(isinstance(e.event, ev.SampleFinished) for e in run.entries())
    drawn = "n => Number(document.querySelector('.timeline canvas').dataset.stays) >= n"
    page.wait_for_function(drawn, arg=samples)  # the whole of the log may come a little later
    assert int(canvas.get_attribute("data-moves")) == figures.migrations
    whole = float(canvas.get_attribute("data-end"))
    canvas.focus()
    page.keyboard.press("+")
    wait_until("the zoom", lambda: float(canvas.get_attribute("data-end")) < whole)
    page.keyboard.press("0")
    wait_until("the whole run", lambda: float(canvas.get_attribute("data-end")) == whole)
    assert ink(page) > 1000
    open_view(page, "learning")
    label = page.get_attribute('canvas[aria-label^="Training reward"]', "aria-label")
    last = [line for line in run.lines("metrics.jsonl") if "step" in line][-1]["reward/mean"]
    assert float(label.split()[-1]) == pytest.approx(last, rel=2e-3)
    page.fill('input[type="search"]', "entropy")
    page.wait_for_selector("text=1 metrics")
    open_view(page, "distributions")
    counts = json.loads(page.get_attribute("[data-counts]", "data-counts"))
    assert counts == list(figures.staleness_counts)
    assert int(page.get_attribute("[data-samples]", "data-samples")) == samples
    open_view(page, "throughput")
    assert page.locator("tbody tr").count() == 2
    assert figure(page, "cpu_unused") == pytest.approx(run.summary()["cpu_unused_ratio"])
    check_groups(page, run, figures)


def check_groups(page: Any, run: Any, figures: AuditFigures) -> None:
    open_view(page, "groups")
    assert figure(page, "groups_total") == figures.groups_issued
    page.select_option("main select >> nth=0", "trained")
    page.wait_for_url("**trained**")
    page.fill('input[type="number"]', "1")
    page.press('input[type="number"]', "Enter")
    wanted = {r["group"] for r in run.lines("rollouts.jsonl") if r["version"] == 1}
    wait_until("the filter", lambda: figure(page, "groups_total") == len(wanted))
    listed = page.eval_on_selector_all("tr[data-group]", "rows => rows.map(r => r.dataset.group)")
    assert set(map(int, listed)) == wanted
    texts = {line["prompt"]: line["text"] for line in run.lines("prompts.jsonl")}
    asked = page.locator("td.prompt").first.get_attribute("title")
    assert asked and asked in texts.values()
    page.click("tr[data-group] >> nth=0")
    page.wait_for_selector('body[data-view="group"]')
    page.wait_for_selector(".tokens .token")
    group = int(listed[0])
    line = next(r for r in run.lines("rollouts.jsonl") if (r["group"], r["sample"]) == (group, 0))
    assert page.locator(".tokens .token").count() == line["num_tokens"] == len(line["logprobs"])
    shown = page.locator(".tokens .turn.policy").inner_text().replace("⏎\n", "\n")
    assert line["text"].strip() in shown
    assert page.locator('[data-figure="sample_finish"] b').inner_text() == line["finish"]
    page.click(".samples a >> nth=1")
    page.wait_for_selector('.samples a[aria-current] >> text="1"')


def ink(page: Any) -> int:
    """How many pixels of the timeline are coloured."""
    return page.evaluate(
        """() => { const c = document.querySelector(".timeline canvas");
          const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
          let n = 0;
          for (let i = 0; i < d.length; i += 4) {
            const [r, g, b] = [d[i], d[i + 1], d[i + 2]];
            if (d[i + 3] > 100 && Math.max(r, g, b) - Math.min(r, g, b) > 60) n++;
          }
          return n; }"""
    )


def test_dark_and_light_differ_and_nothing_is_fetched_from_elsewhere(
    browser: Any, page: Any, tmp_path: Path
) -> None:
    write_long_run(tmp_path / "run", 64, base_steps=2)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    with dashboard(tmp_path / "run", page) as address:
        backgrounds: list[str] = []
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.goto(address)
            page.wait_for_selector('body[data-read="all"]')
            backgrounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert backgrounds[0] != backgrounds[1]
        for view in VIEWS:
            open_view(page, view)
        assert all(url.startswith((address, "data:")) for url in asked)


def test_three_runs_side_by_side(page: Any, tmp_path: Path) -> None:
    for number, name in enumerate(("baseline", "fresh", "long_tail")):
        write_long_run(tmp_path / name, 200 + 100 * number, base_steps=4)
        config = {"orchestration": {"max_staleness": 2, "num_steps": 2 + number}}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    with dashboard(tmp_path, page) as address:
        page.goto(address)
        page.wait_for_selector('body[data-read="all"]')
        assert page.locator("#runs option").all_inner_texts() == ["baseline", "fresh", "long_tail"]
        open_view(page, "compare")
        wait_until("three runs", lambda: page.locator("tr[data-run]").count() == 3)
        assert page.locator("tr[data-key]").count() == 1  # K is the same everywhere
        steps = page.locator('tr[data-key="orchestration.num_steps"] td').all_inner_texts()
        assert steps == ["orchestration.num_steps", "2", "3", "4"]
        reward = page.locator('canvas[aria-label^="reward/mean"]')
        three = "reward/mean; last: baseline"
        assert reward.get_attribute("aria-label").startswith(three)
        assert reward.get_attribute("aria-label").count(",") == 2
        page.click('tr[data-run="0"] input')
        assert reward.get_attribute("aria-label").startswith("reward/mean; last: fresh")
        for axis in ("seconds", "tokens"):
            page.select_option("label:has-text('over') select", axis)
            assert reward.get_attribute("aria-label").count(",") == 1
        with page.expect_download() as saved:
            page.hover('.chart:has(canvas[aria-label^="reward/mean"])')
            page.click('button[aria-label="save reward/mean as a table"]')
        lines = Path(saved.value.path()).read_text().splitlines()
        assert lines[0] == "tokens trained,fresh,long_tail" and len(lines) > 3
        with page.expect_download() as saved:
            page.click('button[aria-label="save reward/mean as a picture"]')
        assert Path(saved.value.path()).read_bytes().startswith(b"\x89PNG")
        page.select_option("#runs", "2")
        page.wait_for_url("**run=2**")
        page.wait_for_function("() => document.title.startsWith('long_tail')")
        open_view(page, "config")
        assert page.locator("tr[data-key]").count() == figure(page, "config_keys") > 0
        open_view(page, "learning")
        before = page.evaluate(PIXELS)
        page.evaluate(SMOOTH)
        assert page.evaluate(PIXELS) != before


PIXELS = """() => document.querySelector('canvas[aria-label^="entropy"]').toDataURL()"""
SMOOTH = """() => { const slider = document.querySelector('input[type="range"]');
  slider.value = 0.9; slider.dispatchEvent(new Event("input")); }"""


def test_a_run_of_a_hundred_thousand_groups(page: Any, tmp_path: Path) -> None:
    num_groups = write_long_run(tmp_path / "long", 100_000)
    assert num_groups >= 100_000
    with dashboard(tmp_path / "long", page) as address:
        page.goto(address)  # how long this takes is in benchmarks/dashboard.py
        page.wait_for_selector('body[data-view="overview"][data-read="all"]')
        assert figure(page, "state_trained") == num_groups
        assert figure(page, "discarded") == 0
        for view in VIEWS:
            open_view(page, view)
        assert figure(page, "groups_total") == num_groups
        page.goto(f"{address}#group/{num_groups - 5}/3")
        page.wait_for_selector(f"text=prompt {num_groups - 5} ")
        page.wait_for_selector("text=simulated")
    assert os.path.getsize(tmp_path / "long" / "rollouts.jsonl") > 1e8
