"""Prompt sources: every format, exact positions, and one clear line for every bad input."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dora_rl.config import DataConfig, DataSource
from dora_rl.data.prompts import check_disjoint, open_data, open_prompts, read_answer
from dora_rl.types import UserError


class CharTokenizer:
    """One token a character, with a small chat template."""

    chat_template: str | None = "yes"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        text.encode()
        return ([1] if add_special_tokens else []) + [ord(c) for c in text]

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        assert options["tokenize"] is False
        if conversation[-1]["role"] == "tool":
            raise ValueError("tools are not supported")
        text = "".join(f"<{m['role']}>{m['content']}" for m in conversation)
        return text + ("<assistant>" if options["add_generation_prompt"] else "")


def write_jsonl(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered(count: int, **columns: object) -> list[dict[str, object]]:
    return [{"prompt": f"What is {i}?", "answer": str(i), **columns} for i in range(count)]


def config_of(*paths: object, **options: object) -> DataConfig:
    return DataConfig.model_validate({"train": [str(path) for path in paths], **options})


def rows_seen(config: DataConfig, count: int, **options: Any) -> list[str]:
    source = open_prompts(config, CharTokenizer(), **options)
    return [source.prompt(i).answer or "" for i in range(count)]


# Order, epochs, resume


def test_each_epoch_gives_every_row_once_in_a_new_order(tmp_path: Path) -> None:
    config = config_of(write_jsonl(tmp_path / "a.jsonl", numbered(50)))
    seen = rows_seen(config, 150)
    everything = sorted(str(i) for i in range(50))
    assert [sorted(seen[i : i + 50]) for i in (0, 50, 100)] == [everything] * 3
    assert seen[:50] != seen[50:100]
    assert seen[:50] != sorted(seen[:50], key=int)


def test_a_prompt_depends_on_its_index_alone(tmp_path: Path) -> None:
    config = config_of(write_jsonl(tmp_path / "a.jsonl", numbered(20)))
    one, two = (open_prompts(config, CharTokenizer()) for _ in range(2))
    forward = [one.prompt(i) for i in range(60)]
    backward = [two.prompt(i) for i in reversed(range(60))]
    assert forward == backward[::-1]
    assert [p.index for p in forward] == list(range(60))
    other = open_prompts(config.model_copy(update={"seed": 1}), CharTokenizer())
    assert [other.prompt(i).answer for i in range(20)] != [p.answer for p in forward[:20]]


def test_no_shuffling_keeps_the_file_order(tmp_path: Path) -> None:
    config = config_of(write_jsonl(tmp_path / "a.jsonl", numbered(5)), shuffle=False)
    assert rows_seen(config, 7) == ["0", "1", "2", "3", "4", "0", "1"]


def test_mixing_weights_and_exact_epochs_of_each_source(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", numbered(30, kind="a"))
    write_jsonl(tmp_path / "b.jsonl", numbered(10, kind="b"))
    config = DataConfig(
        train=(DataSource(path="a.jsonl", weight=3), DataSource(path="b.jsonl", weight=1))
    )
    source = open_prompts(config, CharTokenizer(), base_dir=tmp_path)
    prompts = [source.prompt(i) for i in range(40)]
    assert Counter(p.columns["kind"] for p in prompts) == {"a": 30, "b": 10}
    assert len({(p.columns["kind"], p.answer) for p in prompts}) == 40


def test_fingerprint_changes_with_the_data(tmp_path: Path) -> None:
    config = config_of(write_jsonl(tmp_path / "a.jsonl", numbered(5)))
    before = open_prompts(config, CharTokenizer()).fingerprint()
    assert open_prompts(config, CharTokenizer()).fingerprint() == before
    write_jsonl(tmp_path / "a.jsonl", numbered(6))
    assert open_prompts(config, CharTokenizer()).fingerprint() != before


def test_a_run_that_knew_fewer_keys_of_a_source_began_with_the_same_data() -> None:
    """`answer_after` came later; the fingerprint below was written by a release without it."""
    without, chains = "46cf49fb74a94d9cead559b03a6db4ce", "dora_rl.data.tasks:Chains"
    source = open_prompts(DataConfig(train=(DataSource(path=chains),)), CharTokenizer())
    assert source.fingerprint() != without
    assert source.began_with(without) and source.began_with(source.fingerprint())
    marked = DataConfig(train=(DataSource(path=chains, answer_after="####"),))
    assert not open_prompts(marked, CharTokenizer()).began_with(without)


def test_an_evaluation_set_is_walked_once(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", numbered(5))
    source = open_prompts(DataConfig(eval=(DataSource(path=str(path)),)), CharTokenizer(), "eval")
    assert source.num_prompts == 5
    assert [p.answer for p in source.once()] == ["0", "1", "2", "3", "4"]
    assert [p.index for p in source.once(3)] == [0, 1, 2]


# What a prompt holds


def test_string_prompts_stay_as_they_are_and_columns_reach_the_reward(tmp_path: Path) -> None:
    row = {"prompt": "Add 1 and 2", "solution": 3, "level": {"name": "easy"}, "data_source": "x"}
    prompt = open_prompts(
        config_of(write_jsonl(tmp_path / "a.jsonl", [row])), CharTokenizer()
    ).prompt(0)
    assert prompt.text == "Add 1 and 2"
    assert prompt.token_ids == (1, *map(ord, "Add 1 and 2"))
    assert prompt.answer == "3"
    assert prompt.columns == {**row, "prompt": "Add 1 and 2"}


def test_messages_go_through_the_template(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "Hi"}]}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    prompt = open_prompts(config_of(path, system_prompt="Be brief"), CharTokenizer()).prompt(0)
    assert prompt.text == "<system>Be brief<user>Hi<assistant>"
    assert prompt.token_ids == tuple(map(ord, prompt.text))
    assert prompt.columns["prompt"] == rows[0]["prompt"]
    assert prompt.columns["data_source"] == str(path)
    assert prompt.answer is None


def test_a_prefilled_answer_is_continued(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": messages}])
    assert open_prompts(config_of(path), CharTokenizer()).prompt(0).text == (
        "<user>Hi<assistant>Well,"
    )


def test_strings_can_be_made_user_messages(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "Hi"}])
    prompt = open_prompts(config_of(path, chat="always"), CharTokenizer()).prompt(0)
    assert prompt.text == "<user>Hi<assistant>"


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"answer": "a", "label": "b"}, "a"),
        ({"ground_truth": "a"}, "a"),
        ({"solution": "a"}, "a"),
        ({"label": 4}, "4"),
        ({"label": 0}, "0"),
        ({"reward_model": {"ground_truth": "a", "style": "rule"}}, "a"),
        ({"answer": None, "label": ["x", "y"]}, '["x", "y"]'),
        ({}, None),
    ],
)
def test_where_the_gold_answer_is_found(
    tmp_path: Path, row: dict[str, object], answer: str | None
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", **row}])
    assert open_prompts(config_of(path), CharTokenizer()).prompt(0).answer == answer


def test_other_column_names(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "meta": {"gold": 7}}])
    source = DataSource(path="a.jsonl", prompt_column="question", answer_column="meta.gold")
    prompt = open_prompts(DataConfig(train=(source,)), CharTokenizer(), base_dir=tmp_path).prompt(0)
    assert (prompt.text, prompt.answer) == ("q", "7")


def test_a_real_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "user", "assistant", ":", "Hi", "there"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant :{% endif %}"
    )
    messages = [{"role": "user", "content": "Hi there"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": messages}, {"prompt": "Hi there"}])
    source = open_prompts(config_of(path, shuffle=False), tokenizer)
    assert source.prompt(0).text == "user : Hi there assistant :"
    assert source.prompt(0).token_ids == (1, 3, 4, 5, 2, 3)
    assert source.prompt(1).token_ids == (4, 5)


# Formats


def test_parquet_with_messages_and_odd_types(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"q{i}"}],
            "reward_model": {"ground_truth": str(i), "style": "rule"},
            "day": date(2026, 11, 15),
            "raw": b"\x00\x01",
        }
        for i in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = open_prompts(config_of(tmp_path / "a.parquet", shuffle=False), CharTokenizer())
    prompt = source.prompt(2)
    assert prompt.answer == "2"
    assert prompt.columns["day"] == "2026-11-15"
    assert prompt.columns["raw"] == "AAE="
    json.dumps(prompt.columns)


def test_json_array_blank_lines_and_crlf(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(numbered(3), indent=1))
    assert rows_seen(config_of(tmp_path / "a.json", shuffle=False), 3) == ["0", "1", "2"]
    lines = "\r\n\r\n".join(json.dumps(row) for row in numbered(3))
    (tmp_path / "b.jsonl").write_text(lines, newline="")
    assert rows_seen(config_of(tmp_path / "b.jsonl", shuffle=False), 3) == ["0", "1", "2"]


def save_to_disk(path: Path, rows: list[dict[str, object]], shards: int = 2) -> None:
    """The layout that `datasets.Dataset.save_to_disk` writes."""
    path.mkdir(parents=True)
    files = []
    for shard in range(shards):
        name = f"data-{shard:05d}-of-{shards:05d}.arrow"
        table = pa.Table.from_pylist(rows[shard::shards])
        with pa.ipc.new_stream(str(path / name), table.schema) as writer:
            writer.write_table(table)
        files.append({"filename": name})
    (path / "state.json").write_text(json.dumps({"_data_files": files, "_indices_files": None}))
    (path / "dataset_info.json").write_text("{}")


def test_a_saved_dataset_and_a_dictionary_of_splits(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "one", numbered(6))
    assert sorted(rows_seen(config_of(tmp_path / "one"), 6)) == list("012345")
    save_to_disk(tmp_path / "two" / "train", numbered(4))
    save_to_disk(tmp_path / "two" / "test", numbered(2))
    (tmp_path / "two" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert sorted(rows_seen(config_of(tmp_path / "two"), 4)) == list("0123")
    config = DataConfig(eval=(DataSource(path=str(tmp_path / "two")),))
    assert sorted(rows_seen(config, 2, part="eval")) == ["0", "1"]
    bad = DataConfig(train=(DataSource(path=str(tmp_path / "two"), split="nope"),))
    with pytest.raises(UserError, match=r"no split 'nope'.*\['test', 'train'\]"):
        open_prompts(bad, CharTokenizer())


def test_a_directory_of_files_by_split(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for shard in range(2):
        table = pa.Table.from_pylist(numbered(4)[shard::2])
        pq.write_table(table, data / f"train-{shard:05d}-of-00002.parquet")
    write_jsonl(data / "test.jsonl", numbered(1))
    assert sorted(rows_seen(config_of(tmp_path), 4)) == list("0123")
    with pytest.raises(UserError, match=r"no file of split 'dev'"):
        open_prompts(
            DataConfig(train=(DataSource(path=str(tmp_path), split="dev"),)), CharTokenizer()
        )


def test_directory_without_split_names_is_read_whole(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", numbered(4)[2:])
    write_jsonl(tmp_path / "a.jsonl", numbered(4)[:2])
    assert rows_seen(config_of(tmp_path, shuffle=False), 4) == list("0123")


def test_code_makes_rows(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "class Maker:\n"
        "    def __init__(self, top=10): self.top = top\n"
        "    def row(self, seed, index, split):\n"
        "        return {'prompt': f'{split} {index % self.top}', 'answer': index}\n"
        "ready = Maker(3)\n"
    )
    made = DataSource(path="task.py:Maker", options={"top": 4})
    source = open_prompts(DataConfig(train=(made,)), CharTokenizer(), base_dir=tmp_path)
    source.check()
    assert source.num_prompts is None
    assert source.prompt(10**6 + 5).text == "train 1"
    assert source.prompt(9) == source.prompt(9)
    with pytest.raises(UserError, match="never ends"):
        next(source.once())
    ready = DataConfig(eval=(DataSource(path="task.py:ready"),))
    prompts = open_prompts(ready, CharTokenizer(), "eval", tmp_path)
    assert [p.text for p in prompts.once(2)] == ["test 0", "test 1"]


def test_the_built_in_task_has_disjoint_splits() -> None:
    chains = DataSource(path="dora_rl.data.tasks:Chains", options={"num_steps_max": 9})
    config = DataConfig(train=(chains,), eval=(chains,), seed=3)
    train = open_prompts(config, CharTokenizer())
    evaluation = open_prompts(config, CharTokenizer(), "eval")
    check_disjoint(train, evaluation)
    assert re.fullmatch(r"0\d:\d{3}\n", train.prompt(5).text)
    assert train.prompt(5).columns["split"] == "train"
    assert evaluation.prompt(5).columns["split"] == "heldout"


# The length limit and the disjointness check


def test_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * n, "answer": n} for n in range(1, 41)]
    config = config_of(write_jsonl(tmp_path / "a.jsonl", rows), prompt_tokens_max=30)
    source = open_prompts(config, CharTokenizer())
    # The beginning-of-text token counts: 29 characters are the longest that fit.
    assert source.sources[0].num_too_long == 11
    assert source.num_prompts == 29
    seen = {source.prompt(i).answer for i in range(29)}
    assert seen == {str(n) for n in range(1, 30)}
    assert "11 too long" in source.describe()[0]


def test_quick_length_test_agrees_with_the_tokenizer(tmp_path: Path) -> None:
    rows = [
        {"prompt": [{"role": "user", "content": mark * n}]}
        for n in range(60)
        for mark in ("x", "é")
    ][2:]
    config = config_of(write_jsonl(tmp_path / "a.jsonl", rows), prompt_tokens_max=50, shuffle=False)
    source = open_prompts(config, CharTokenizer())
    unlimited = open_prompts(config.model_copy(update={"prompt_tokens_max": 0}), CharTokenizer())
    expected = [p.text for p in unlimited.once() if len(p.token_ids) <= 50]
    assert [p.text for p in source.once()] == expected
    assert 0 < len(expected) < len(rows)


def test_overlap_between_training_and_evaluation_is_refused(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", numbered(5))
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "What is 3? "}]
    test = write_jsonl(tmp_path / "test.jsonl", [{"prompt": "new"}, {"prompt": messages}])
    config = DataConfig(train=(DataSource(path=str(train)),), eval=(DataSource(path=str(test)),))
    sources = [open_prompts(config, CharTokenizer(), part) for part in ("train", "eval")]
    with pytest.raises(UserError, match=r"train\.jsonl line 4 .*test\.jsonl line 2"):
        check_disjoint(sources[0], sources[1])
    with pytest.raises(UserError, match="check_disjoint = false"):
        open_data(config, CharTokenizer())
    allowed = config.model_copy(update={"check_disjoint": False})
    opened = open_data(allowed, CharTokenizer())
    assert opened[1] is not None
    assert [source.num_prompts for source in opened if source] == [5, 2]
    alone = config.model_copy(update={"eval": ()})
    assert open_data(alone, CharTokenizer())[1] is None


# Bad input: one clear line, before anything starts

BAD_LINES = [
    ("{oops", r"a\.jsonl line 2: not JSON .*one JSON object on each line"),
    ("[1, 2]", r"a\.jsonl line 2: a row must be an object, not list"),
    ('{"question": "x"}', r"line 2: no 'prompt' \(columns: question\); set prompt_column"),
    ('{"prompt": null}', r"line 2: no 'prompt'"),
    ('{"prompt": "  "}', r"line 2: the prompt is empty"),
    ('{"prompt": 5}', r"line 2: 'prompt' must be a string or a list of messages, not int"),
    ('{"prompt": []}', r"line 2: .* not an empty list"),
    ('{"prompt": ["x"]}', r"line 2: message 0 must be an object with 'role' and 'content'"),
    ('{"prompt": [{"role": "user"}]}', r"line 2: message 0 has no 'content'"),
    ('{"prompt": [{"role": "tool", "content": "é"}]}', r"line 2: the chat template refused"),
    ('{"prompt": "\\ud800"}', r"line 2: the prompt cannot be tokenized"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_row_is_found_at_the_start(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=message) as caught:
        open_prompts(config_of(path), CharTokenizer()).check()
    assert "\n" not in str(caught.value)


def bad_sources(tmp_path: Path) -> list[tuple[DataSource, str]]:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.csv").touch()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nonsense")
    (tmp_path / "broken.json").write_text("[1,")
    (tmp_path / "hollow").mkdir()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "gone"}]}')
    (tmp_path / "code.py").write_text(
        "number = 5\nclass Plain: pass\n"
        "class Bad:\n    def row(self, seed, index, split): return 1 // 0\n"
    )
    (tmp_path / "wrong.py").write_text("undefined_name\n")
    return [
        (DataSource(path="nowhere.jsonl"), "does not exist"),
        (DataSource(path="empty.jsonl"), "has no rows"),
        (DataSource(path="a.csv"), "is not one of"),
        (DataSource(path="broken.parquet"), "is not a parquet file"),
        (DataSource(path="broken.json"), "is not JSON"),
        (DataSource(path="hollow"), "holds no"),
        (DataSource(path="saved"), "is not a saved dataset"),
        (
            DataSource(path="code.py:gone"),
            "code.py:gone: there is no 'gone' in it; check data.train",
        ),
        (DataSource(path="code.py:number"), "has no method row"),
        (DataSource(path="code.py:Plain"), "has no method row"),
        (DataSource(path="code.py:Bad"), "its code raised ZeroDivisionError"),
        (DataSource(path="code.py:Plain", options={"x": 1}), "does not take the options"),
        (DataSource(path="wrong.py:x"), "NameError"),
        (DataSource(path="no.such.module:x"), "cannot load"),
    ]


def test_bad_sources_get_one_line_each(tmp_path: Path) -> None:
    for source, message in bad_sources(tmp_path):
        with pytest.raises(UserError, match=message) as caught:
            open_prompts(DataConfig(train=(source,)), CharTokenizer(), base_dir=tmp_path).check()
        assert "\n" not in str(caught.value)
        assert source.path.split(":")[0].split(".")[0] in str(caught.value)


def test_other_bad_settings(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "é"}]}])
    with pytest.raises(UserError, match=r"data\.train is empty"):
        open_prompts(DataConfig(), CharTokenizer())
    with pytest.raises(UserError, match=r"data\.chat is 'never'"):
        open_prompts(config_of(path, chat="never"), CharTokenizer())
    with pytest.raises(UserError, match=r"all 1 prompts .* longer than data\.prompt.* = 2"):
        open_prompts(config_of(path, prompt_tokens_max=2), CharTokenizer())
    bare = CharTokenizer()
    bare.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        open_prompts(config_of(path), bare)
    answer = DataConfig(train=(DataSource(path=str(path), answer_column="gold"),))
    with pytest.raises(UserError, match=r"line 1: no 'gold' \(columns: prompt\)"):
        open_prompts(answer, CharTokenizer()).check()


class TestAnswerAfter:
    """GSM8K as it comes: the solution, then `#### 72`."""

    SOURCE = DataSource(path="a.jsonl", prompt_column="question", answer_after="####")

    def test_the_answer_follows_the_last_mark(self) -> None:
        row = {"question": "q", "answer": "48/2 = 24 #### no\n#### 72"}
        assert read_answer(row, self.SOURCE, "row 0") == "72"

    def test_commas_of_numbers_go(self) -> None:
        assert read_answer({"answer": "#### 1,234,567"}, self.SOURCE, "row 0") == "1234567"
        assert read_answer({"answer": "#### 3,5"}, self.SOURCE, "row 0") == "3,5"

    def test_a_row_without_the_mark_is_named(self) -> None:
        with pytest.raises(UserError, match=r"^row 7: no '####' in the answer; set answer_after"):
            read_answer({"answer": "72"}, self.SOURCE, "row 7")
