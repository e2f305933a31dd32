"""Prompt sources: an endless, seeded stream of prompts over one or several data sources.

Never keeps a position. Invariant: `prompt(i)` is a pure function of (sources, seed, i), so the
exact position of a run is the next index and nothing else; each epoch of a source gives every kept
row once. Rows, the length limit and the templates are checked before the first prompt is asked for.

    train, evaluation = open_data(config.data, tokenizer)
    train.prompt(0), train.prompt(10**9), ...

A string prompt is encoded as it stands (with the tokenizer's own beginning-of-text, if any); a
message list goes through the tokenizer's chat template. Every column of the row reaches the reward
in `Prompt.columns`; there, `prompt` is the prompt as the user wrote it (string or messages). A row
that cannot give a prompt is a `UserError` that says where the row is and what to change.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from dora_rl.config import DataConfig, DataSource
from dora_rl.data.order import Interleave, epoch_key, permute
from dora_rl.data.pools import Pools
from dora_rl.data.rows import OpenSource, Row, Rows, open_rows
from dora_rl.model.tokenizer import Tokenizer
from dora_rl.types import Prompt, UserError
from dora_rl.user_code import one_line, require

# A file up to this many rows is checked row by row even where no length limit asks for it.
CHECK_ALL_ROWS_MAX = 20_000
# A train prompt is compared with evaluation prompts over this many rows of an endless source.
DISJOINT_ROWS_MAX = 2_000
ANSWER_ROWS_MAX = 200_000  # of one source, looked through for rows without an answer
RECENT = 1024  # prompts kept, as they were made
DEFAULT_SPLITS = {"train": "train", "eval": "test"}
LATER_KEYS = ("answer_after",)  # of a source: runs of earlier releases have fingerprints without


@dataclass(frozen=True, slots=True)
class Unanswered:
    """How many of so many rows have no answer, and where the user finds the first."""

    num: int
    num_looked: int
    first: str


class PromptSource:
    def __init__(
        self, config: DataConfig, sources: Sequence[OpenSource], renderer: Renderer
    ) -> None:
        assert sources
        self._config, self._renderer, self.sources = config, renderer, tuple(sources)
        self._interleave = Interleave.of([source.config.weight for source in sources])
        with_pools = self.sources if config.curriculum != "off" else ()
        self._pools = [Pools(config, source, number) for number, source in enumerate(with_pools)]
        self._recent = lru_cache(RECENT)(self._make)  # asked for again with every sample of it

    def prompt(self, index: int) -> Prompt:
        """The prompt at a place of the endless stream."""
        return self._recent(index)

    def _make(self, index: int) -> Prompt:
        assert index >= 0, f"prompt index {index}"
        if self._pools:
            return self._make_of_pool(index)
        number, draw = self._interleave.place(index)
        source = self.sources[number]
        if source.num_kept is None:
            return self._render(index, source, draw)
        epoch, offset = divmod(draw, source.num_kept)
        if self._config.shuffle:
            offset = permute(offset, source.num_kept, epoch_key(self._config.seed, number, epoch))
        return self._render(index, source, source.row_number(offset))

    def _make_of_pool(self, index: int) -> Prompt:
        """Under a curriculum: pools of the sources take turns."""
        draw, pool = divmod(index, self.num_pools)
        part, number = divmod(pool, len(self.sources))
        source = self.sources[number]
        return self._render(index, source, source.row_number(self._pools[number].place(part, draw)))

    @property
    def num_pools(self) -> int:
        """Of the curriculum, over all sources; 0 where there is none."""
        return sum(pools.num_pools for pools in self._pools)

    @property
    def num_prompts(self) -> int | None:
        """Kept rows of all sources together; None if one of them is endless."""
        counts = [source.num_kept for source in self.sources]
        return None if None in counts else sum(count for count in counts if count is not None)

    def once(self, limit: int | None = None) -> Iterator[Prompt]:
        """Every kept row once, source by source in stored order (an evaluation set).

        `limit` is a number per source; an endless source needs one.
        """
        endless = [source.config.path for source in self.sources if source.num_kept is None]
        if endless and limit is None:
            raise UserError(f"data: {endless[0]} never ends; give the evaluation a size")
        for index, (source, row) in enumerate(self._first_rows(limit or 0, limit)):
            yield self._render(index, source, row)

    def check(self) -> None:
        """Make the first prompts of every source, so that bad input fails before a run starts."""
        for _ in self.once(self._config.check_rows):
            pass

    def _first_rows(
        self, endless_max: int, limit: int | None = None
    ) -> Iterator[tuple[OpenSource, int]]:
        """The kept rows of each source, in stored order; of an endless one `endless_max`."""
        for source in self.sources:
            places = range(endless_max if source.num_kept is None else source.num_kept)
            yield from ((source, source.row_number(place)) for place in places[:limit])

    def without_answer(self) -> Unanswered:
        """Rows that have no answer, or an empty one. Of an endless source the first are looked at,
        of a long one the first `ANSWER_ROWS_MAX`."""
        num, num_looked, first = 0, 0, ""
        for source, row in self._first_rows(self._config.check_rows, ANSWER_ROWS_MAX):
            where = source.rows.where(row)
            answer = read_answer(source.rows.row(row), source.config, where)
            num_looked += 1
            if answer is None or not answer.strip():
                num, first = num + 1, first or where
        return Unanswered(num, num_looked, first)

    def began_with(self, fingerprint: str) -> bool:
        """Whether it is this stream's, also where the release that took it knew fewer keys."""
        return fingerprint in (self.fingerprint(), self.fingerprint(LATER_KEYS))

    def fingerprint(self, unless_set: Collection[str] = ()) -> str:
        """Changes when the stream does, so that a resumed run can notice other data.

        Covers the configuration, the number of rows and three rows of each source; keys of a source
        that are `unless_set` where they are set.
        """
        parts: list[object] = [self._config.seed, self._config.shuffle]
        if self._pools:
            parts.append([self._config.curriculum, self._config.curriculum_column, self.num_pools])
        for source in self.sources:
            count = source.rows.num_rows or 3
            samples = plain([source.rows.row(i) for i in sorted({0, count // 2, count - 1})])
            keys = source.config.model_dump().items()
            config = {key: value for key, value in keys if value or key not in unless_set}
            parts.append([config, source.split, count, source.num_kept, samples])
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def describe(self) -> list[str]:
        """One line per source, for `dora-rl check` and the log."""
        pools = f", {self.num_pools} pools" if self._pools else ""
        return [
            f"{source.config.path}: {source.rows.num_rows or 'endless'} rows, "
            f"{source.num_too_long} too long, weight {source.config.weight:g}{pools}"
            for source in self.sources
        ]

    def _render(self, index: int, source: OpenSource, row: int) -> Prompt:
        where = source.rows.where(row)
        prompt = self._renderer.prompt(index, source.rows.row(row), source.config, where)
        limit = self._config.prompt_tokens_max
        if limit and len(prompt.token_ids) > limit:
            # Rows of a file were filtered; only rows that are made on the fly can get here.
            raise UserError(
                f"{where}: the prompt has {len(prompt.token_ids)} tokens; "
                f"make shorter ones or raise data.prompt_tokens_max ({limit})"
            )
        return prompt


def open_prompts(
    config: DataConfig,
    tokenizer: Tokenizer,
    part: Literal["train", "eval"] = "train",
    base_dir: str | Path = ".",
) -> PromptSource:
    """Open, check and filter all sources of `data.train` or `data.eval`."""
    if not (entries := config.train if part == "train" else config.eval):
        raise UserError(f"data.{part} is empty; give a file, a directory or package.module:name")
    if part == "eval":
        config = config.model_copy(update={"curriculum": "off"})
    renderer = Renderer(config, tokenizer)
    sources = []
    for entry in entries:
        split = entry.split or DEFAULT_SPLITS[part]
        rows = open_rows(
            entry, split=split, seed=config.seed, base_dir=Path(base_dir), key=f"data.{part}"
        )
        kept = _rows_that_fit(rows, entry, config, renderer)
        sources.append(OpenSource(entry, split, rows, kept))
    return PromptSource(config, sources, renderer)


def open_data(
    config: DataConfig, tokenizer: Tokenizer, base_dir: str | Path = "."
) -> tuple[PromptSource, PromptSource | None]:
    """Training and evaluation prompts, with every check that the configuration asks for."""
    train = open_prompts(config, tokenizer, "train", base_dir)
    train.check()
    if not config.eval:
        return train, None
    evaluation = open_prompts(config, tokenizer, "eval", base_dir)
    evaluation.check()
    if config.check_disjoint:
        check_disjoint(train, evaluation)
    return train, evaluation


def _rows_that_fit(
    rows: Rows, entry: DataSource, config: DataConfig, renderer: Renderer
) -> Sequence[int] | None:
    """Look at every row: refuse a bad one, leave out one that is too long. None: all are kept."""
    limit = config.prompt_tokens_max
    if rows.num_rows is None or (not limit and rows.num_rows > CHECK_ALL_ROWS_MAX):
        return None
    numbers = range(rows.num_rows)
    kept = array("q", (i for i in numbers if renderer.fits(rows.row(i), entry, rows.where(i))))
    if not kept:
        raise UserError(
            f"data: all {rows.num_rows} prompts of {entry.path} are longer than "
            f"data.prompt_tokens_max = {limit} tokens; raise it"
        )
    return kept if len(kept) < rows.num_rows else None


def check_disjoint(train: PromptSource, evaluation: PromptSource) -> None:
    """Refuse evaluation prompts that are also training prompts."""
    seen = dict(_prompt_keys(evaluation))
    for key, where in _prompt_keys(train):
        if key in seen:
            raise UserError(
                f"data: {where} is a training prompt and {seen[key]} the same for evaluation; "
                f"remove one or set data.check_disjoint = false"
            )


def _prompt_keys(prompts: PromptSource) -> Iterator[tuple[bytes, str]]:
    """A key for what the user asks, the same for a string and for a single user message."""
    for source in prompts.sources:
        for i in range(source.rows.num_rows or DISJOINT_ROWS_MAX):
            where = source.rows.where(i)
            written = read_prompt(source.rows.row(i), source.config, where)
            if isinstance(written, list):
                asked = [m.get("content") for m in written if m["role"] != "system"]
                written = asked[0] if len(asked) == 1 and isinstance(asked[0], str) else asked
            text = json.dumps(written.strip() if isinstance(written, str) else written)
            yield hashlib.blake2b(text.encode(), digest_size=16).digest(), where


Written: TypeAlias = str | list[dict[str, object]]  # a prompt as the user has it

# Where the field's datasets keep the gold answer.
ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "label", "reward_model.ground_truth")
# What a template may add to a message (role, begin, end), for the quick test of length only.
MESSAGE_TOKENS_SLACK = 16


class Renderer:
    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._has_template = bool(getattr(tokenizer, "chat_template", None))

    def prompt(self, index: int, row: Row, source: DataSource, where: str) -> Prompt:
        written = read_prompt(row, source, where)
        text, token_ids = self._encode(written, where)
        columns = {name: plain(value) for name, value in row.items()}
        columns["prompt"] = written
        columns.setdefault("data_source", source.name or source.path)
        shown = token_ids[:1] if source.prompt_tokens == "first" else token_ids
        return Prompt(index, shown, text, read_answer(row, source, where), columns, source.env)

    def fits(self, row: Row, source: DataSource, where: str) -> bool:
        """Whether the prompt is within the limit. Most rows are passed without tokenizing them.

        A token stands for at least one byte of ASCII text, so a text with fewer bytes than the
        limit, less what the template adds, cannot be too long.
        """
        written = read_prompt(row, source, where)
        if not (limit := self._config.prompt_tokens_max):
            return True
        texts = [written] if isinstance(written, str) else _contents(written)
        if texts is not None and all(text.isascii() for text in texts):
            slack = self._template_tokens + MESSAGE_TOKENS_SLACK * len(texts)
            if sum(map(len, texts)) + slack <= limit:
                return True
        return len(self._encode(written, where)[1]) <= limit

    @cached_property
    def _template_tokens(self) -> int:
        """Of a conversation that says next to nothing."""
        plain_text = self._config.chat == "never" or not self._has_template
        short: Written = "x" if plain_text else [{"role": "user", "content": "x"}]
        return len(self._encode(short, "a conversation of one word")[1])

    def _encode(self, written: Written, where: str) -> tuple[str, tuple[int, ...]]:
        if isinstance(written, str) and self._config.chat == "always":
            written = [{"role": "user", "content": written}]
        as_it_stands = isinstance(written, str)
        text = written if isinstance(written, str) else self._apply_template(written, where)
        try:
            token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=as_it_stands))
        except (UnicodeError, TypeError) as error:
            raise UserError(f"{where}: the prompt cannot be tokenized ({error})") from error
        if not token_ids:
            raise UserError(f"{where}: the prompt has no tokens; leave the row out or fill it")
        return text, token_ids

    def _apply_template(self, messages: list[dict[str, object]], where: str) -> str:
        require(
            (
                self._config.chat != "never",
                f"{where}: the prompt is a message list, but data.chat is 'never'",
            ),
            (
                self._has_template,
                f"{where}: the prompt is a message list, but the tokenizer has no chat template; "
                f"use a model with one or string prompts",
            ),
        )
        if self._config.system_prompt and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._config.system_prompt}, *messages]
        prefilled = messages[-1]["role"] == "assistant"
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not prefilled,
                continue_final_message=prefilled,
                **self._config.template_options,
            )
        except Exception as error:
            # A template is the model author's program and may raise anything.
            raise UserError(
                f"{where}: the chat template refused the prompt ({one_line(error)})"
            ) from error


def read_prompt(row: Row, source: DataSource, where: str) -> Written:
    """The prompt as the user wrote it, checked: a string, or messages with role and content."""
    if (value := row.get(source.prompt_column)) is None:
        raise UserError(
            f"{where}: no {source.prompt_column!r} (columns: {', '.join(map(str, row))}); "
            f"set prompt_column to the column that holds the prompt"
        )
    if isinstance(value, str):
        if not value.strip():
            raise UserError(f"{where}: the prompt is empty; leave the row out or fill it")
        return value
    if not isinstance(value, (list, tuple)) or not value:
        raise UserError(
            f"{where}: {source.prompt_column!r} must be a string or a list of messages, "
            f"not {type(value).__name__ if value else 'an empty list'}"
        )
    return [_message(entry, number, where) for number, entry in enumerate(value)]


def _message(entry: object, number: int, where: str) -> dict[str, object]:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
        raise UserError(f"{where}: message {number} must be an object with 'role' and 'content'")
    message = {str(key): plain(value) for key, value in entry.items() if value is not None}
    if not isinstance(message.get("content"), (str, list)) and "tool_calls" not in message:
        raise UserError(f"{where}: message {number} has no 'content' (a string)")
    return message


def _contents(messages: Sequence[Mapping[str, object]]) -> list[str] | None:
    """All texts of plain messages; None where something is more than a role and a text."""
    plain_ones = [message for message in messages if message.keys() == {"role", "content"}]
    texts = [text for message in plain_ones if isinstance(text := message["content"], str)]
    return texts if len(texts) == len(messages) else None


def read_answer(row: Row, source: DataSource, where: str) -> str | None:
    """The gold answer: of its column, what follows the mark (`answer_after`) if there is one."""
    names = (source.answer_column,) if source.answer_column else ANSWER_COLUMNS
    value = next((found for name in names if (found := _inside(row, name)) is not None), None)
    if value is None and source.answer_column:
        raise UserError(
            f"{where}: no {source.answer_column!r} (columns: {', '.join(map(str, row))}); "
            f"set answer_column, or leave it out to search for the answer"
        )
    text = plain(value)
    if text is not None and not isinstance(text, str):
        text = json.dumps(text, ensure_ascii=False)
    mark = source.answer_after
    if text is None or not mark:
        return text
    _, found, rest = text.rpartition(mark)
    if not found:
        raise UserError(
            f"{where}: no {mark!r} in the answer; set answer_after to the mark before the final "
            "answer, or leave it out to take the whole column"
        )
    return re.sub(r"(?<=\d),(?=\d{3}\b)", "", rest.strip())


def _inside(row: Row, name: str) -> object:
    """The value of a column; dots lead into nested ones."""
    value: object = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def plain(value: object) -> object:
    """The value as JSON can carry it, since prompts travel between processes."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return plain(cast(Any, value).tolist())
    return str(value)  # dates, decimals, UUIDs and whatever else there is
