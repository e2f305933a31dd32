"""Every file of a run directory flipped, cut, emptied and deleted: the run goes on to the very same
weights, or one line names the file and what can still be done. Never a traceback or another model.

Three runs are damaged: one that was killed in the middle of a step, the same after its host has
lost its shared memory, and one that has finished and is made longer. A few cases are always tried;
the whole table takes minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dora_rl.cli import main
from dora_rl.config import CheckpointConfig
from dora_rl.controller.run import Run
from dora_rl.controller.run_dir import check_same_data, make_run_dir
from dora_rl.core.state import Phase
from dora_rl.observe.audit import audit_run
from dora_rl.setup.prepare import prepare
from dora_rl.setup.settings import load_config
from dora_rl.trainer.checkpoints.state import Checkpoints
from tests.kit.inline_runs import config_of, train

STEPS, KILLED_AT = 5, 3
CHAINS = {"path": "dora_rl.data.tasks:Chains", "options": {"num_steps_max": 8}}
SIDE = ("chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json")
SAVED = (
    *SIDE,
    "tokenizer_config.json",
    "model.safetensors",
    "trainer/state.json",
    "trainer/optimizer.safetensors",
    "trainer/rng.safetensors",
)
SCORE = "checkpoints/step_000001/trainer/score.json"
SEALED = ("model.safetensors", "manifest.json")


def of(folder: str, names: tuple[str, ...]) -> list[str]:
    return [f"{folder}/{name}" for name in names]


# Written for people: whatever becomes of them, the run goes on.
FOR_PEOPLE = ["metrics.jsonl", "rollouts.jsonl", "prompts.jsonl", "totals.json", "learner.json"]
FOR_PEOPLE += ["sinks.json"]
LOCKS = [".lock", ".learner-lock", *(f"{p}/.lock" for p in ("weights", "learner/masters"))]
COMMON = [
    *FOR_PEOPLE,
    *LOCKS,
    "learner/moments/.lock",
    "config.json",
    "data.json",
    "table.log",
    "events/000000000000.jsonl",
    "journal/instance0.0.jsonl",
    "journal/instance1.0.jsonl",
    *of("checkpoints/step_000001", SAVED),
    SCORE,
    *of("weights/00000002", SEALED),
    *of("weights/00000003", SEALED),
    *of("learner/masters/00000003", SEALED),
]
CUT_OFF = [*COMMON, *of("weights/00000000", SEALED), *of("learner/moments/00000003", SEALED)]
FILES = {
    "killed": CUT_OFF,
    "rebooted": CUT_OFF,
    "finished": [
        *COMMON,
        "summary.json",
        *of("learner/moments/00000001", SEALED),
        *of("checkpoints/step_000002", SAVED),
    ],
}
DAMAGE = ("flipped", "cut", "emptied", "deleted")
SINK = """
class Remembers:
    def __init__(self, facts):
        facts.keep_id("mine", facts.kept_id("mine") or "the-first")
    def write(self, line): pass
    def close(self): pass
"""
# What the learner goes on from may be older than its weights, which it says: never other weights.
OLDER_MOMENTS = ("learner/moments/", "checkpoints/")
FAST = [
    ("finished", "checkpoints/step_000002/trainer/optimizer.safetensors", "flipped"),
    ("finished", "learner/masters/00000003/model.safetensors", "flipped"),
    ("finished", "weights/00000003/model.safetensors", "flipped"),
    ("finished", "weights/00000002/manifest.json", "emptied"),
    ("finished", "metrics.jsonl", "flipped"),
    ("finished", "prompts.jsonl", "flipped"),
    ("finished", "sinks.json", "cut"),
    ("finished", SCORE, "emptied"),
    ("killed", "weights/00000003/model.safetensors", "cut"),
    ("killed", "events/000000000000.jsonl", "cut"),
    ("killed", "events/000000000000.jsonl", "deleted"),
    ("killed", "table.log", "flipped"),
    ("killed", "table.log", "deleted"),
    ("killed", "config.json", "cut"),
    ("killed", "totals.json", "emptied"),
    ("rebooted", "learner/moments/00000003/manifest.json", "deleted"),
    ("rebooted", "learner/masters/00000003/manifest.json", "cut"),
]


@dataclass
class Kept:
    """Runs as they were, to be damaged one after the other in the same place."""

    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def shared(self) -> Path:
        return self.folder / "run-shared"

    def config(self, num_steps: int = STEPS) -> Path:
        config = config_of(
            self.run,
            orchestration={"mode": "sync", "num_steps": num_steps, "batch_groups": 4},
            data={"train": [CHAINS], "eval": [CHAINS]},
            evaluation={"num_prompts": 2, "num_samples": 1},
            checkpoint={"every_steps": 2, "state_every_s": 0.0},
            logging={"progress": True, "sinks": [f"{self.folder}/sink.py:Remembers"]},
        )
        (self.folder / "sink.py").write_text(SINK)
        path = self.folder / "tiny.json"
        path.write_text(config.model_dump_json())
        return path

    def keep(self, name: str) -> None:
        # As an evaluation of that version would have noted.
        Checkpoints(self.run / "checkpoints", CheckpointConfig()).rate(1, 0.5)
        shutil.copytree(self.run, self.folder / name / "run")
        if self.shared.is_dir():
            shutil.copytree(self.shared, self.folder / name / "shared")

    def bring_back(self, name: str) -> None:
        for place in (self.run, self.shared):
            shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(self.folder / name / "run", self.run)
        if (self.folder / name / "shared").is_dir():
            shutil.copytree(self.folder / name / "shared", self.shared)

    def resume(self) -> int:
        return main(["train", str(self.config()), "--resume"])

    def checksum(self, version: int = STEPS) -> str:
        manifest = self.run / "weights" / f"{version:08d}" / "manifest.json"
        return json.loads(manifest.read_text())["manifest"]["checksum"]


def kill_in_a_step(kept: Kept) -> None:
    """As a power cut of the process: in the middle of a step, with samples that wait."""

    def watch(run: Run) -> Callable[[], bool]:
        def look() -> bool:
            state = run.state
            requests = [r for group in state.groups.values() for r in group.requests]
            waits = any(request.phase is Phase.SCORED for request in requests)
            if state.committed == KILLED_AT and state.num_active and waits:
                os._exit(9)
            return False

        return look

    config = load_config(kept.config())
    make_run_dir(kept.run)
    check_same_data(prepare(config).train, kept.run)
    process = os.fork()
    if process == 0:
        try:
            train(config, watch=watch)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    found = Kept(tmp_path_factory.mktemp("damaged"))
    kill_in_a_step(found)
    found.keep("killed")
    found.keep("rebooted")
    shutil.rmtree(found.folder / "rebooted" / "shared")
    for place in (found.run, found.shared):
        shutil.rmtree(place)
    assert main(["train", str(found.config(KILLED_AT))]) == 0
    found.keep("finished")
    return found


@pytest.fixture(scope="session")
def expected(kept: Kept) -> str:
    """The weights at the end, which are the same whatever came in between."""
    found: set[str] = set()
    for name in FILES:
        kept.bring_back(name)
        assert kept.resume() == 0
        found.add(kept.checksum())
    assert len(found) == 1
    return found.pop()


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command has its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    path.chmod(0o600)
    if how == "deleted":
        path.unlink()
    elif how == "flipped":
        place = len(data) // 2
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :])
    else:
        path.write_bytes(data[: len(data) // 2] if how == "cut" else b"")


def try_it(
    kept: Kept, expected: str, state: str, name: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    kept.bring_back(state)
    if how != "deleted" and not (kept.run / name).stat().st_size:
        return
    damage(kept.run / name, how)
    before = {v: kept.checksum(v) for v in (KILLED_AT,) if f"weights/{v:08d}" not in name}
    capfd.readouterr()
    status = kept.resume()
    said = "".join(capfd.readouterr())
    assert "Traceback" not in said, said
    if status:
        assert name not in FOR_PEOPLE and status in (2, 3), said
        (line,) = [line for line in said.splitlines() if line.startswith("dora-rl: ")]
        part = name.partition("/")[0] if name.startswith("events/") else name
        assert str(kept.run / part) in line, line
        assert "restore" in line or "delete it" in line, line
        assert all(kept.checksum(v) == checksum for v, checksum in before.items())
    elif kept.checksum() != expected:
        assert name.startswith(OLDER_MOMENTS), said
        assert "cannot be used" in said or how == "deleted", said
        assert "optimizer" in said, said
    if not status:
        assert not audit_run(kept.run / "events").findings


@pytest.mark.parametrize(("state", "name", "how"), FAST)
def test_a_damaged_file_is_no_other_model(
    kept: Kept, expected: str, state: str, name: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try_it(kept, expected, state, name, how, capfd)


@pytest.mark.full
@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize(
    ("state", "name"), [(state, name) for state, names in FILES.items() for name in names]
)
def test_no_damaged_file_is_another_model(
    kept: Kept, expected: str, state: str, name: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try_it(kept, expected, state, name, how, capfd)


@pytest.mark.parametrize("state", FILES)
def test_the_table_has_every_file(kept: Kept, state: str) -> None:
    root = kept.folder / state / "run"
    there = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
    pictures = {name for name in there if name.endswith(".png")}
    assert there - pictures == set(FILES[state])
