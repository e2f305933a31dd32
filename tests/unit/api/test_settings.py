"""Keywords, rows and functions as a configuration, checked with the words of the file."""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora_rl.api.settings import Given, new_run_dir, settle
from dora_rl.config import RunConfig
from dora_rl.controller.run_dir import check_run_dir
from dora_rl.types import UserError
from dora_rl.user_code import load_object
from tests.kit.places import MODEL, ROOT

ROWS = [{"prompt": "01", "answer": "7"}, {"prompt": "02", "answer": "8"}]


class Game:
    def score(self, completion: str) -> float:
        return 0.0


class RunLike:
    directory = Path("run")


def settled(folder: Path, config: Any = None, **keywords: Any) -> tuple[RunConfig, Given]:
    names = ("model", "data", "eval_data", "reward", "run_dir")
    found = {name: keywords.pop(name, None) for name in names}
    return settle(
        {"model": MODEL, "run_dir": folder / "run"} | {k: v for k, v in found.items() if v},
        config,
        keywords,
    )


def test_sections_keys_and_dotted_names(tmp_path: Path) -> None:
    keywords = {
        "trainer": {"lr": 1e-3, "threads": 1},
        "trainer__lr": 2e-3,
        "rollout.num_samples": 4,
    }
    config, _ = settled(tmp_path, **keywords)
    assert (config.trainer.lr, config.trainer.threads, config.rollout.num_samples) == (2e-3, 1, 4)
    assert config.model.path == str(MODEL)


def test_a_file_comes_first_and_stays_as_it_is(tmp_path: Path) -> None:
    quickstart = ROOT / "recipes" / "quickstart.toml"
    config, _ = settled(tmp_path, quickstart, orchestration__num_steps=3)
    assert config.orchestration.num_steps == 3 and config.data.train
    tables = {"trainer": {"lr": 1e-3}}
    assert settled(tmp_path, tables, trainer__lr=1e-4)[0].trainer.lr == 1e-4
    assert tables == {"trainer": {"lr": 1e-3}}


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"trainer__learning": 1}, "unknown key trainer.learning; there are lr"),
        ({"trainer__lrr": 1}, "unknown key trainer.lrr; did you mean trainer.lr?"),
        ({"lr": 1}, "unknown keyword lr; did you mean trainer__lr?"),
        ({"seed": 1}, "did you mean data__seed or "),
        ({"nonsense": 1}, "unknown keyword nonsense; write section__key=value"),
        ({"trainer": 3}, "trainer is a section, not a value"),
        ({"trainer__lr": -1.0}, "trainer.lr = -1.0: must be"),
        ({"orchestration__mode": "snyc"}, "orchestration.mode"),
        ({"data": []}, "data.train: give rows"),
        ({"data": iter(ROWS)}, "data.train: give rows"),
        ({"reward": object()}, "reward.functions"),
        ({"reward": print}, "reward.functions: print is neither a function nor a class"),
        ({"reward": partial(max, 1)}, "give arguments to functools.partial by name"),
        ({"algorithm__loss": len}, "algorithm.loss: len is neither"),
        ({"reward": [].append}, "append is neither"),
        ({"reward": Game().score}, "score, a method of Game, is neither a function"),
        ({"learning_rate": 1e-6}, "unknown keyword learning_rate; did you mean trainer__lr?"),
        ({"reward_funcs": [len]}, "unknown keyword reward_funcs; did you mean reward?"),
        ({"peft_config": {"r": 8}}, "keyword peft_config; did you mean trainer__lora_rank?"),
        ({"trainer": {"beta": 0.1}}, "key trainer.beta; did you mean algorithm__kl_coef?"),
        (
            {"actor_rollout_ref.rollout.n": 4},
            "unknown key actor_rollout_ref.rollout.n; did you mean rollout__num_samples?",
        ),
        ({"data__prompt_column": "frage"}, 'data={"path": rows or a path, "prompt_column": ...}'),
        ({"data": {"path": ROWS, "promt_column": "a"}}, "did you mean 'prompt_column'?"),
        ({"data": {"prompt": ["1", "2"], "answer": ["1"]}}, "differ in length (prompt 2, answer"),
        ({"model": Game()}, "not a Game; write it with save_pretrained(DIRECTORY) first"),
        ({"model": RunLike()}, "not a RunLike; write it with run.export(DIRECTORY) first"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as error:
        if keywords.get("data") == []:  # nothing is not the same as an empty list
            settle({"model": MODEL, "data": [], "run_dir": tmp_path / "run"}, None, {})
        settled(tmp_path, **keywords)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_given_things_lie_in_the_run_directory(tmp_path: Path) -> None:
    def score(completion: str, answer: str, bonus: float = 0.0) -> float:
        return float(completion == answer) + bonus

    rows = [{"question": "1+1?", "answer": "so\n#### 2", "level": np.int64(3)}]
    config, given = settled(
        tmp_path,
        data=rows,
        eval_data={"path": "held.jsonl"},
        reward=[partial(score, bonus=2.0), "format", {"name": score, "weight": 0.5, "label": "x"}],
    )
    (train,) = config.data.train
    assert (train.prompt_column, train.answer_after, train.name) == ("question", "####", "train")
    assert [source.path for source in config.data.eval] == ["held.jsonl"]
    first, second, third = config.reward.functions
    assert (first.label, first.options) == ("score", {"bonus": 2.0})
    assert second.name == "format" and (third.weight, third.label) == (0.5, "x")
    assert not (tmp_path / "run").exists()  # nothing is written before it is asked for
    given.put_down()
    check_run_dir(tmp_path / "run", resume=False)  # and a run may begin there
    assert json.loads(Path(train.path).read_text()) == rows[0]
    there = load_object(first.name, tmp_path, section="reward", key="reward.functions")
    assert there is not score and there("2", "2", bonus=1.0) == 2.0
    given.take_back()
    assert not (tmp_path / "run").exists()


def test_classes_and_losses_travel_too(tmp_path: Path) -> None:
    class Game:
        pass

    def loss(x: int) -> int:
        return x

    config, given = settled(tmp_path, env__environments=[Game], algorithm__loss=loss)
    given.put_down()
    assert config.env.environments[0].label == "Game"
    assert config.algorithm.loss.endswith(":loss") and Path(config.algorithm.loss[:-5]).is_file()


class Dataset:
    """What `datasets.Dataset` is, as far as it matters."""

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Any:
        return iter(ROWS)


def test_a_dataset_and_a_dictionary_of_two(tmp_path: Path) -> None:
    config, given = settled(tmp_path, data={"train": Dataset(), "eval": ROWS[:1], "shuffle": False})
    given.put_down()
    lines = Path(config.data.train[0].path).read_text().splitlines()
    assert list(map(json.loads, lines)) == ROWS and not config.data.shuffle
    assert Path(config.data.eval[0].path).name == "eval.jsonl"


def test_rows_in_place_of_a_path(tmp_path: Path) -> None:
    rows = [{"frage": "1?", "antwort": "2", "prompt": "not this", "answer": "nor\n#### this"}]
    table = {"path": rows, "prompt_column": "frage", "answer_column": "antwort"}
    config, given = settled(tmp_path, data=[table, "b.jsonl", {"path": ROWS, "weight": 2.0}])
    first, second, third = config.data.train
    assert (first.prompt_column, first.answer_column, first.name) == ("frage", "antwort", "train")
    assert not first.answer_after
    assert second.path == "b.jsonl" and (third.name, third.weight) == ("train_2", 2.0)
    given.put_down()
    assert json.loads(Path(first.path).read_text()) == rows[0]
    assert [json.loads(line) for line in Path(third.path).read_text().splitlines()] == ROWS


def test_a_table_of_columns_is_rows(tmp_path: Path) -> None:
    config, given = settled(tmp_path, data={"prompt": ["01", "02"], "answer": ["7", "8"]})
    given.put_down()
    lines = Path(config.data.train[0].path).read_text().splitlines()
    assert list(map(json.loads, lines)) == ROWS


def test_paths_and_tables_are_what_they_are_in_a_file(tmp_path: Path) -> None:
    config, _ = settled(tmp_path, data=["a.jsonl", Path("b.jsonl"), {"path": "c", "weight": 2.0}])
    assert [source.path for source in config.data.train] == ["a.jsonl", "b.jsonl", "c"]


def test_a_row_that_is_none_is_named(tmp_path: Path) -> None:
    _, given = settled(tmp_path, data=[ROWS[0], "text"])
    with pytest.raises(UserError, match=r"data\.train row 1: a row must be a dictionary, not str"):
        given.put_down()


def test_a_run_has_a_directory_of_its_own(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    now = datetime(2026, 11, 19, 15, 45, 2)
    assert new_run_dir(now) == Path("runs/20261119-154502")
    assert new_run_dir(now) == Path("runs/20261119-154502-2")
    config, _ = settle({"model": MODEL}, None, {})
    assert Path(config.runtime.run_dir).parent == tmp_path / "runs"
