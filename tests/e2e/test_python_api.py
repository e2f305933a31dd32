"""`dora_rl.train` as a program uses it: from a thread with processes, and inline in this one."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import dora_rl
from dora_rl.setup.settings import load_config
from tests.kit.places import MODEL

ROWS = [{"prompt": f"{number:02d}:", "answer": "7"} for number in range(40)]
SMALL = {
    "rollout": {"num_samples": 4, "tokens_max": 8, "kv_bytes_max": 1 << 25},
    "orchestration": {"batch_groups": 2, "num_steps": 3},
    "trainer": {"lr": 1e-3, "threads": 1},
    "evaluation": {"num_prompts": 4},
    "logging": {"progress": False},
    "runtime": {"world": "inline", "device": "cpu"},
}


def sevens(completion: str, answer: str) -> float:
    return completion.count(answer) / max(1, len(completion))


def train(folder: Path, **more: Any) -> dora_rl.Run:
    arguments = {"data": ROWS, "reward": sevens, "run_dir": folder / "run", "config": SMALL}
    return dora_rl.train(MODEL, **(arguments | more))


NOTEBOOK = """
import threading, dora_rl
rows = [{"prompt": f"{n:02d}:", "answer": "7"} for n in range(40)]
def sevens(completion, answer):
    return completion.count(answer) / max(1, len(completion))
def work():
    global run
    run = dora_rl.train(MODEL, rows, sevens, config=SMALL, run_dir="run", on_step=steps.append)
steps = []
thread = threading.Thread(target=work)
thread.start(); thread.join()
print(len(steps), run.metrics["step"], len(run.samples), run.done, run.audit().findings)
"""


def test_ten_lines_train_from_a_thread(tmp_path: Path) -> None:
    """With processes, in a script that is not guarded by `if __name__ == "__main__"`."""
    local = SMALL | {"runtime": {"device": "cpu"}}
    (tmp_path / "notebook.py").write_text(f"MODEL, SMALL = {str(MODEL)!r}, {local!r}\n{NOTEBOOK}")
    command = [sys.executable, "notebook.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3 [0, 1, 2] 24 True ()"
    assert load_config(tmp_path / "run" / "config.json").reward.functions[0].label == "sevens"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dora_rl.Run, list[dict[str, Any]]]:
    """A run with evaluations, and what its callbacks heard."""
    heard: list[dict[str, Any]] = []
    run = train(
        tmp_path_factory.mktemp("whole"),
        eval_data=[{"prompt": "99:", "answer": "7"}],
        reward=[lambda completion, answer: float(len(completion)), sevens],
        on_step=heard.append,
        on_evaluation=lambda line: heard.append(line),
    )
    return run, heard


def test_callbacks_hear_every_line(whole: tuple[dora_rl.Run, list[dict[str, Any]]]) -> None:
    run, heard = whole
    assert run.metrics == [line for line in heard if "step" in line]
    assert run.evaluations == [line for line in heard if "step" not in line]
    assert run.metrics["step"] == [0, 1, 2] and run.evaluations["version"] == [0, 3]
    assert len(run.metrics["rewards/lambda/mean"]) == 3
    assert run.metrics[-1]["rewards/sevens/mean"] == run.metrics["rewards/sevens/mean"][-1]
    with pytest.raises(KeyError, match="no line has 'reward/maen'; did you mean 'reward/mean'"):
        run.metrics["reward/maen"]


def test_samples_are_what_was_trained(whole: tuple[dora_rl.Run, list[dict[str, Any]]]) -> None:
    run, _ = whole
    samples = list(run.samples)
    assert repr(run.samples).startswith(f"<24 samples in {run.directory}")
    assert len(samples) == len(run.samples) == run.summary["samples_trained"] == 24
    for one in samples:
        assert one["reward"] == pytest.approx(len(one["text"]) + sevens(one["text"], "7"))
        assert one["step"] - one["version"] <= run.config.orchestration.max_staleness
    assert run.done and run.audit().findings == () and "3 steps, all steps" in repr(run)


def test_the_model_of_a_run(whole: tuple[dora_rl.Run, list[dict[str, Any]]]) -> None:
    """That of transformers gives the log-probs of an engine of the same run."""
    run, _ = whole
    model = run.model().eval()
    with dora_rl.Engine(run, kv_bytes_max=1 << 25) as engine:
        ((one,),) = engine.generate("03:274\n", tokens_max=12, seed=3)
        assert engine.version == 3
    ids = torch.tensor([one.prompt_ids + one.token_ids])
    with torch.no_grad():
        logprobs = model(ids).logits[0].log_softmax(-1)
    first = len(one.prompt_ids) - 1
    there = [float(logprobs[first + i, token]) for i, token in enumerate(one.token_ids)]
    assert one.logprobs == pytest.approx(there, abs=1e-4)
    before = dora_rl.Engine(MODEL, kv_bytes_max=1 << 25).generate("03:274\n", tokens_max=12, seed=3)
    assert before[0][0].logprobs != one.logprobs  # trained
    with pytest.raises(dora_rl.UserError, match=r"^step 77: the run keeps only"):
        run.model(77)
    with pytest.raises(dora_rl.UserError, match=r"^step 77: the run keeps only"):
        dora_rl.Engine(run, step=77)
    assert run.tokenizer().decode(one.token_ids, skip_special_tokens=True) == one.text


def test_a_callback_stops_a_run_that_is_resumed(tmp_path: Path) -> None:
    run = train(tmp_path, on_step=lambda line: line["step"] == 0)
    assert not run.done and run.metrics["step"] == [0]
    assert run.summary["stopped"] == "a callback stopped it (on_step)"
    again = dora_rl.Run(tmp_path / "run").resume(orchestration__num_steps=4)
    assert again.done and again.metrics["step"] == [0, 1, 2, 3] and again.audit().findings == ()
    with pytest.raises(dora_rl.UserError, match=r"already holds .*Run\(run_dir\)\.resume\(\)"):
        train(tmp_path)


def test_an_exception_of_a_callback_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    def fails(line: dict[str, Any]) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as error:
        train(tmp_path, on_step=fails)
    assert any("can be resumed" in note for note in error.value.__notes__)
    run = dora_rl.Run(tmp_path / "run")
    assert run.metrics["step"] == [0] and "on_step raised KeyError" in run.summary["stopped"]
    assert run.resume().audit().findings == ()


def test_ctrl_c_stops_after_saving(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    run = train(tmp_path, on_step=lambda line: signal.raise_signal(signal.SIGINT))
    assert run.metrics["step"] == [0] and run.summary["stopped"] == "interrupted"
    assert "go on with run.resume()" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is before


def test_a_reward_that_raises_is_mended_in_place(tmp_path: Path) -> None:
    def broken(completion: str, answer: str) -> float:
        raise ValueError("never")

    with pytest.raises(dora_rl.RunStopped) as error:
        train(tmp_path, reward=broken, orchestration__attempts_max=1)
    run = error.value.run
    assert run.directory == tmp_path / "run" and not run.done
    (file,) = (run.directory / "given").glob("functions_*.py")
    way = f"mend broken in {file}, then run.resume()"
    assert str(error.value).endswith(f"raised ValueError: never; {way}")
    with pytest.raises(dora_rl.UserError) as refused:
        run.resume(reward=sevens)
    assert str(refused.value) == f"Run.resume: reward stays what the run began with; {way}"
    file.write_text(file.read_text().replace('raise ValueError("never")', "return 1.0"))
    run.resume()
    assert run.done and set(run.metrics["reward/mean"]) == {1.0} and run.audit().findings == ()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            {"data": [{"frage": "1:", "antwort": "7"}]},
            "data: row 0 has no 'prompt' (columns: frage, antwort); set prompt_column "
            '(data={"path": rows, "prompt_column": ...})',
        ),
        (
            {"eval_data": [{"prompt": "2:", "answer": "1"}, {"promt": "2"}]},
            "eval_data: row 1 has no 'prompt' (columns: promt); set prompt_column (eval_data={",
        ),
        (
            {"data": [ROWS[0]], "eval_data": [ROWS[1], ROWS[0]]},
            "row 1 of eval_data",
        ),
        ({"reward": lambda x: 1.0}, "reward: a lambda takes (x), which is none of the known"),
        ({"reward": [sevens, lambda x: 0, lambda y: y]}, "reward: a lambda takes (x), which"),
    ],
)
def test_refusals_speak_of_what_was_given(tmp_path: Path, wrong: Any, says: str) -> None:
    with pytest.raises(dora_rl.UserError) as error:
        train(tmp_path, **wrong)
    assert says in str(error.value) and "/given/" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(dora_rl.UserError, match="no column 'difficulty'"):
        train(tmp_path, reward=lambda completion, difficulty: 0.0, data=ROWS)
    assert not (tmp_path / "run").exists()
