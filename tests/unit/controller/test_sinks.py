"""Metric sinks: each gets every line, one that fails is told of once, none ends or holds up a run.

TensorBoard is the real package, read back with its own reader. The other services are small fakes
with the calls of the real packages, put where `import` finds them.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dora_rl.controller.records import CELL_MAX, Records, TrainedSample
from dora_rl.controller.sinks import LINES_MAX, RunFacts, Sinks, check_sinks, flat
from dora_rl.types import UserError

STEP = {"step": 0, "reward/mean": 0.5, "name": "text", "flag": True}
LATER = {"step": 1, "reward/mean": 0.75}
EVALUATION = {"version": 0, "eval/sampled": 0.25}
CONFIG = {"model": {"path": "tiny"}, "trainer": {"lr": 0.1, "betas": [0.9, 0.95]}}


ROWS = [{"group": 3, "response": "a<b|c\nd"}, {"group": 4, "response": ""}]


def write_all(
    name: str, run_dir: Path, *lines: Any, first_step: int = 0, **options: Any
) -> list[str]:
    """What a run with one sink tells the user. A pair is a step with its samples."""
    told: list[str] = []
    config = CONFIG | {"logging": {"sink_options": {name: options}}} if options else CONFIG
    sinks = Sinks([name], RunFacts(run_dir, config, first_step), told.append)
    for line in lines:
        sinks.samples(*line) if isinstance(line, tuple) else sinks.write(line)
    sinks.close(20.0)
    return told


def test_tensorboard_for_real(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    torn = {"step": 2, "reward/mean": 9.0}  # written just before a crash, trained again later
    assert write_all("tensorboard", tmp_path, STEP, EVALUATION, LATER, (1, ROWS), torn) == []
    again = {"step": 2, "reward/mean": 1.0}
    assert write_all("tensorboard", tmp_path, again, first_step=2) == []
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    (table,) = found.Tensors("samples")
    text = table.tensor_proto.string_val[0].decode()
    assert table.step == 1 and text.splitlines()[2] == "| 3 | a&lt;b&#124;c<br>d |"
    assert set(found.Tags()["scalars"]) == {"reward/mean", "eval/sampled"}
    rewards = [(event.step, event.value) for event in found.Scalars("reward/mean")]
    assert rewards == [(0, 0.5), (1, 0.75), (2, 1.0)]


def fake_wandb(calls: list[Any]) -> types.ModuleType:
    module: Any = types.ModuleType("wandb")

    class Run:
        id = "abc123"

        def define_metric(self, name: str, step_metric: str | None = None) -> None:
            calls.append(("define", name, step_metric))

        def log(self, data: dict[str, Any], step: int | None = None) -> None:
            assert step is None, "evaluations come late; W&B drops steps that go back"
            calls.append(("log", data))

        def finish(self) -> None:
            calls.append(("finish",))

    def init(
        project: str,
        name: str,
        id: str | None,
        resume: str,
        dir: str,
        config: dict[str, Any],
        **more: str,
    ) -> Run:
        calls.append(("init", project, name, id, resume, config["trainer"]["lr"], *more.values()))
        return Run()

    module.init = init
    module.Table = lambda columns, data: (columns, data)
    return module


def test_wandb_gets_lines_with_their_own_axes_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(calls))
    run_dir = tmp_path / "my_run"
    run_dir.mkdir()
    assert write_all("wandb", run_dir, STEP, EVALUATION) == []
    assert calls[0] == ("init", "dora-rl", "my_run", None, "allow", 0.1)
    assert ("define", "eval/*", "version") in calls and ("define", "*", "step") in calls
    assert [c[1] for c in calls if c[0] == "log"] == [STEP, EVALUATION]
    assert calls[-1] == ("finish",)
    calls.clear()
    write_all("wandb", run_dir, LATER, first_step=1)
    assert calls[0][3] == "abc123"


@pytest.mark.parametrize("text", ['{"wandb": "abc', "", "[]", '{"wandb": 7}', "\udcff"])
def test_ids_that_are_damaged_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb([]))
    (tmp_path / "sinks.json").write_bytes(text.encode(errors="surrogateescape"))
    (line,) = write_all("wandb", tmp_path, LATER, first_step=1)
    assert f"{tmp_path}/sinks.json is damaged; delete it" in line and "the run goes on" in line


def test_samples_and_settings_of_the_user_reach_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(calls))
    assert write_all("wandb", tmp_path, (7, ROWS), project="mine", entity="us") == []
    assert calls[0] == ("init", "mine", tmp_path.name, None, "allow", 0.1, "us")
    table = (["group", "response"], [[3, "a<b|c\nd"], [4, ""]])
    assert [c[1] for c in calls if c[0] == "log"] == [{"samples": table, "step": 7}]


class FakeMlflow:
    """MlflowClient's calls as they are used; ids and batches are kept."""

    def __init__(self) -> None:
        self.metrics: list[tuple[str, float, int]] = []
        self.params: dict[str, str] = {}
        self.status: list[str | None] = []
        self.experiments: dict[str, str] = {}
        self.num_runs = 0
        self.texts: dict[str, str] = {}

    def log_text(self, run_id: str, text: str, artifact_file: str) -> None:
        self.texts[artifact_file] = text

    def get_experiment_by_name(self, name: str) -> Any:
        known = self.experiments.get(name)
        return types.SimpleNamespace(experiment_id=known) if known else None

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = "7"
        return "7"

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        assert experiment_id == "7"
        self.num_runs += 1
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"run{self.num_runs}"))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert run_id == "run1" and len(params) <= 100
        self.metrics += [(m.key, m.value, m.step) for m in metrics]
        self.params |= {p.key: p.value for p in params}

    def set_terminated(self, run_id: str, status: str | None = None) -> None:
        self.status.append(status)


def test_mlflow_gets_metrics_params_and_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeMlflow()
    module, entities = types.ModuleType("mlflow"), types.ModuleType("mlflow.entities")
    addresses: list[str | None] = []
    module.MlflowClient = lambda uri: addresses.append(uri) or client  # type: ignore[attr-defined]
    entities.Metric = lambda key, value, timestamp, step: types.SimpleNamespace(  # type: ignore[attr-defined]
        key=key, value=value, step=step
    )
    entities.Param = lambda key, value: types.SimpleNamespace(key=key, value=value)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    assert write_all("mlflow", tmp_path, STEP, EVALUATION) == []
    assert client.metrics == [("reward/mean", 0.5, 0), ("eval/sampled", 0.25, 0)]
    assert client.params == {
        "model.path": "tiny",
        "trainer.lr": "0.1",
        "trainer.betas": "[0.9, 0.95]",
    }
    assert write_all("mlflow", tmp_path, LATER, (1, ROWS), first_step=1) == []
    assert "| 3 | a&lt;b&#124;c<br>d |" in client.texts["samples/step_000001.md"]
    other = write_all(
        "mlflow", tmp_path, LATER, first_step=1, tracking_uri="http://x", experiment="e"
    )
    assert other == [] and addresses == [None, None, "http://x"]
    client.status.pop(), client.status.pop()
    assert client.num_runs == 1 and client.status == [None, "RUNNING", None]


def test_trackio_gets_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    module: Any = types.ModuleType("trackio")

    class Run:
        def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
            calls.append((step, metrics))

        def finish(self) -> None:
            calls.append("finish")

    def init(project: str, name: str, config: dict[str, Any], resume: str, **more: str) -> Run:
        calls.append((project, name, resume, *more.values()))
        return Run()

    module.init = init
    module.Table = lambda columns, data: (columns, data)
    monkeypatch.setitem(sys.modules, "trackio", module)
    assert write_all("trackio", tmp_path, STEP, EVALUATION) == []
    assert calls[0][0] == "dora-rl" and calls[0][2] == "never"
    assert calls[1:] == [(0, {"reward/mean": 0.5}), (0, {"eval/sampled": 0.25}), "finish"]
    name = calls[0][1]
    calls.clear()
    write_all("trackio", tmp_path, (1, ROWS), first_step=1, project="mine", space_id="s")
    assert calls[0] == ("mine", name, "allow", "s")
    table = (["group", "response"], [[3, "a<b|c\nd"], [4, ""]])
    assert calls[1:] == [(1, {"samples": table}), "finish"]


class Broken:
    """Fails in the middle."""

    def __init__(self, facts: RunFacts) -> None:
        self.num = 0

    def write(self, line: dict[str, Any]) -> None:
        self.num += 1
        if self.num == 2:
            raise ConnectionError("no route\nto host")

    def close(self) -> None:
        raise AssertionError("a sink that is off is not closed")


class Kept:
    lines: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, facts: RunFacts) -> None:
        Kept.lines = []

    def write(self, line: dict[str, Any]) -> None:
        Kept.lines.append(line)

    def close(self) -> None:
        Kept.lines.append({"closed": True})


def test_a_sink_that_fails_is_told_of_once_and_the_others_go_on(tmp_path: Path) -> None:
    told: list[str] = []
    writers = {"bad": Broken, "good": Kept}
    sinks = Sinks(["bad", "good"], RunFacts(tmp_path, {}, 0), told.append, writers.__getitem__)
    records = Records(tmp_path, rollouts=False, sinks=sinks)
    for version in range(5):
        records.evaluation(version, {"sampled": 0.1 * version})
    records.close()
    assert len(told) == 1 and "bad failed: ConnectionError: no route;" in told[0]
    assert len(Kept.lines) == 6 and Kept.lines[-1] == {"closed": True}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


def test_a_sink_that_hangs_holds_nothing_up(tmp_path: Path) -> None:
    release = threading.Event()

    class Hanging(Kept):
        def write(self, line: dict[str, Any]) -> None:
            release.wait(30)

    told: list[str] = []
    sinks = Sinks(["slow"], RunFacts(tmp_path, {}, 0), told.append, {"slow": Hanging}.__getitem__)
    for step in range(5):
        sinks.write({"step": step})
    sinks.close(0.2)
    assert len(told) == 1 and "not done" in told[0]
    flooded = Sinks(["slow"], RunFacts(tmp_path, {}, 0), told.append, {"slow": Hanging}.__getitem__)
    for step in range(LINES_MAX + 5):
        flooded.write({"step": step})
    flooded.close(0.2)
    assert len(told) == 2 and "takes nothing" in told[1]
    release.set()


def test_services_that_start_at_once_keep_all_their_ids(tmp_path: Path) -> None:
    facts, num = RunFacts(tmp_path, {}, 1), 8
    together = threading.Barrier(num)

    def start(number: int) -> None:
        together.wait(30)
        for life in range(20):
            facts.keep_id(f"service{number}", str(life))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [facts.kept_id(f"service{number}") for number in range(num)] == ["19"] * num


class Shown(Kept):
    rows: ClassVar[list[tuple[int, Any]]] = []

    def samples(self, step: int, rows: Any) -> None:
        Shown.rows.append((step, rows))


def test_samples_from_the_best_to_the_worst_are_shown(tmp_path: Path) -> None:
    """To the sink that shows them; the other one hears nothing of them and works on."""
    told: list[str] = []
    Shown.rows = []
    writers = {"shows": Shown, "plain": Kept}
    sinks = Sinks(["shows", "plain"], RunFacts(tmp_path, {}, 0), told.append, writers.__getitem__)
    records = Records(tmp_path, rollouts=False, sinks=sinks, samples_shown=3)
    rewards = (0.1, 0.9, 0.5, 0.7, 0.3)
    made = [trained_sample(n, reward) for n, reward in enumerate(rewards)]
    records.step(0, {}, [*made, replace(made[0], sample=9, text="", reward=2.0)], {})
    records.close()
    assert told == []
    ((step, rows),) = Shown.rows
    assert step == 0 and [row["reward"] for row in rows] == [0.9, 0.5, 0.1]
    assert rows[0] == {
        "group": 5, "sample": 1, "version": 0, "reward": 0.9, "finish": "eos", "num_tokens": 2,
        "prompt": "why", "response": f"{'r' * CELL_MAX}…",
    }  # fmt: skip


def trained_sample(number: int, reward: float) -> TrainedSample:
    return TrainedSample(
        group=5, sample=number, version=0, num_prompt=3, num_tokens=2, reward=reward, finish="eos",
        text="r" * (CELL_MAX + 1), prompt="why", segments=1, logprobs=[-0.1, -0.2],
        logprob_sum=-0.3, token_ids=[1, 2],
    )  # fmt: skip


def test_settings_that_reach_nobody_or_break_a_resume_are_refused() -> None:
    check_sinks(["tensorboard"], {"tensorboard": {"flush_secs": 5}})
    with pytest.raises(UserError, match=r"logging.sinks has no wandb \(tensorboard\)"):
        check_sinks(["tensorboard"], {"wandb": {"project": "p"}})
    with pytest.raises(UserError, match=r"logging.sink_options.wandb.id: the run sets it"):
        check_sinks(["wandb"], {"wandb": {"id": "p"}})


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    check_sinks([], {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"wandb is not installed; pip install wandb"):
        check_sinks(["wandb"], {})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("wanb", "wanb is none of tensorboard, wandb, mlflow, trackio, nor path/to/file.py:Name"),
        ("absent.py:Sink", "absent.py does not exist; check logging.sinks"),
        ("math:pi", "math:pi is not a class"),
    ],
)
def test_a_name_that_is_no_sink_is_one_line(name: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        check_sinks([name], {})


def test_the_configuration_becomes_flat() -> None:
    assert flat(CONFIG) == {
        "model.path": "tiny",
        "trainer.lr": 0.1,
        "trainer.betas": [0.9, 0.95],
    }
    assert json.dumps(flat(CONFIG))
