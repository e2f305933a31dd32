"""`dora-rl init` looks at model and data, and `dora-rl check` accepts what it writes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dora_rl.cli import main
from dora_rl.rewards.base import ScoreItem, build
from dora_rl.setup import hub, starter
from dora_rl.setup.settings import load_config
from tests.kit.places import MODEL

ROWS = {
    "chains": [{"prompt": f"{n:02d}:", "answer": "746"} for n in range(30)],
    "words": [{"question": f"{n:02d}:", "target": "seven"} for n in range(30)],
    "gsm8k": [{"question": f"{n:02d}:", "answer": f"so\n#### {n},000"} for n in range(30)],
    "chat": [
        {"messages": [{"role": "user", "content": f"{n:02d}:"}], "answer": None} for n in range(30)
    ],
}


@pytest.mark.parametrize(
    ("name", "source", "reward", "chat"),
    [
        ("chains", {}, "math", "always"),
        ("words", {"prompt_column": "question", "answer_column": "target"}, "exact", "always"),
        ("gsm8k", {"prompt_column": "question", "answer_after": "####"}, "math", "always"),
        ("chat", {"prompt_column": "messages"}, "length", "auto"),
    ],
)
def test_check_accepts_it(
    tmp_path: Path, monkeypatch: Any, name: str, source: dict[str, str], reward: str, chat: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    assert main(["init", str(MODEL), "rows.jsonl", "--out", "mine.toml"]) == 0
    text = Path("mine.toml").read_text()
    assert tomllib.loads(text)["runtime"] == {"run_dir": "runs/mine"} and text.count("# ") > 15
    config = load_config(Path("mine.toml"))
    (train,) = config.data.train
    assert train.model_dump(exclude_defaults=True) == {"path": "rows.jsonl", **source}
    assert config.reward.functions[0].name == reward and config.data.chat == chat
    small = ["rollout.kv_bytes_max=33554432", "runtime.device=cpu"]
    assert main(["check", "mine.toml", *small]) == 0
    assert not Path("runs").exists()
    assert main(["init", str(MODEL), "rows.jsonl", "--out", "mine.toml"]) == 2  # it stays
    assert Path("mine.toml").read_text() == text


def test_numbers_without_math_verify(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(starter, "find_spec", lambda name: None)
    data, out = tmp_path / "rows.jsonl", tmp_path / "mine.toml"
    data.write_text('{"prompt": "01:", "answer": "746"}\n')
    assert main(["init", str(MODEL), str(data), "--out", str(out)]) == 0
    reward = build(load_config(out).reward)
    items = [ScoreItem("", "", text, answer="746") for text in ("01:463 is 746", "746, then 1")]
    assert reward.score(items) == [1.0, 0.0]


def test_a_file_without_a_prompt_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "rows.jsonl", tmp_path / "mine.toml"
    data.write_text('{"foo": "a", "bar": 1}\n')
    assert main(["init", str(MODEL), str(data), "--out", str(out)]) == 2
    assert "none of its columns (foo, bar) is a prompt" in capsys.readouterr().err
    assert not out.exists()


def test_a_hub_id_becomes_a_directory_or_one_line(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    asked: list[str] = []

    def download(name: str, **options: Any) -> str:
        asked.append(name)
        if name == "some/model":
            return str(MODEL)
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.local_model("some/model") == str(MODEL)
    assert hub.local_model(str(MODEL)) == str(MODEL)
    assert hub.local_model("models/a/b") == "models/a/b"  # no id: its absence is told elsewhere
    assert asked == ["some/model"]
    assert main(["init", "away/model", "rows.jsonl", "--out", str(tmp_path / "x.toml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "away/model is no directory here, and it cannot be had from the hub" in line
    assert "hf download away/model --local-dir DIR" in line
