"""What `check` shows of data and reward before a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dora_rl.cli import main
from dora_rl.config import RunConfig
from dora_rl.data.prompts import open_data
from dora_rl.setup.prepare import DataCheck, check_data
from tests.kit.places import MODEL, ROOT

QUICKSTART = ROOT / "recipes" / "quickstart.toml"


class Letters:
    """One token a letter, and a chat template."""

    chat_template = "yes"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode()

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        said = "".join(f"<{m['role']}>{m['content']}\n" for m in conversation)
        return f"{said}<assistant>"


def looked_at(tmp_path: Path, rows: list[dict[str, Any]], reward: str) -> DataCheck:
    train, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out.write_text(json.dumps({"prompt": "held out", "answer": "1"}) + "\n")
    data = {"train": [str(train)], "eval": [str(held_out)], "system_prompt": "Be brief."}
    config = RunConfig.model_validate(
        {
            "model": {"path": str(MODEL)},
            "data": data | {"shuffle": False},
            "reward": {"functions": [reward]},
        }
    )
    return check_data(config, *open_data(config.data, Letters(), "."))


def test_the_first_prompt_is_shown_as_the_template_renders_it(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "What is 1+1?"}]
    found = looked_at(tmp_path, [{"prompt": chat, "answer": "2"}], "exact")
    text = "\n".join(found.lines())
    assert "  | <system>Be brief.\n  | <user>What is 1+1?\n  | <assistant>" in text
    assert f"{found.first_prompt_tokens} tokens" in text and "its answer: '2'" in text
    assert not found.problems


def test_the_evaluation_rows_are_shown(tmp_path: Path) -> None:
    found = looked_at(tmp_path, [{"prompt": "a", "answer": "2"}], "exact")
    assert f"evaluation: {tmp_path}/eval.jsonl: 1 rows, 0 too long, weight 1" in found.lines()
    assert any("evaluation of the first 1 prompts" in line for line in found.lines())


FORMS = {
    "def f(completion, answer): return 0.0": "form plain",
    "def f(prompts, completions, **columns): return []": "form trl",
    "def f(data_source, solution_str, ground_truth, extra_info=None): return 0.0": "form verl",
    "def f(prompt, completion, answer): return 0.0": "form verifiers",
}


@pytest.mark.parametrize("code", FORMS)
def test_the_form_of_the_reward_is_shown(tmp_path: Path, code: str) -> None:
    (tmp_path / "mine.py").write_text(code + "\n")
    found = looked_at(tmp_path, [{"prompt": "a", "answer": "2"}], f"{tmp_path}/mine.py:f")
    assert FORMS[code] in found.rewards[0] and "found by its parameters" in found.rewards[0]


def test_rows_without_an_answer_are_found_where_the_reward_needs_one(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"{i}", "answer": str(i)} for i in range(9)]
    rows[4] = {"prompt": "no answer"}
    rows[7] = {"prompt": "an empty one", "answer": " "}
    (tmp_path / "mine.py").write_text("def f(completion, answer): return 0.0\n")
    for reward in ("exact", f"{tmp_path}/mine.py:f"):
        (problem,) = looked_at(tmp_path, rows, reward).problems
        assert "data.train: 2 of 9 rows have no answer" in problem
        assert f"the first is {tmp_path}/train.jsonl line 5" in problem
    assert not looked_at(tmp_path, rows, "format").problems
    (tmp_path / "free.py").write_text("def f(completion, answer=None): return 0.0\n")
    assert not looked_at(tmp_path, rows, f"{tmp_path}/free.py:f").problems


def test_check_says_it_all_and_ends_with_1(tmp_path: Path, capsys) -> None:
    data, out = tmp_path / "d.jsonl", tmp_path / "check.json"
    data.write_text('{"prompt": "32:917", "answer": "1"}\n{"prompt": "32:918"}\n')
    settings = [f"model.path={MODEL}", f"data.train={data}", f"runtime.run_dir={tmp_path / 'r'}"]
    argv = ["check", str(QUICKSTART), *settings, "reward.functions=exact", "--json", str(out)]
    assert main(argv) == 1
    said = capsys.readouterr().out
    assert "problem: data.train: 1 of 2 rows have no answer" in said and "line 2" in said
    assert "reward exact: built-in" in said and "evaluation of the first" in said
    assert "  | 32:91" in said
    (problem,) = json.loads(out.read_text())["plan"]["data"]["problems"]
    for more in (["--dry-run"], []):
        argv = ["train", str(QUICKSTART), *settings, "reward.functions=exact", *more]
        assert main(argv) == 2, "training refuses what the check does"
        assert capsys.readouterr().err == f"dora-rl: error: {problem}\n"
    assert not (tmp_path / "r").exists()
