"""Prompt sources: an endless, seeded stream of prompts over one or several data sources.

Never keeps a position. Invariant: `prompt(i)` is a pure function of (sources, seed, i), so the
exact position of a run is the next index and nothing else; each epoch of a source gives every kept
row once. Rows, the length limit and the templates are checked before the first prompt is asked for.

    train, evaluation = open_data(config.data, tokenizer)
    train.prompt(0), train.prompt(10**9), ...
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from dora_rl.config import DataConfig, DataSource
from dora_rl.data.order import Interleave, epoch_key, permute
from dora_rl.data.render import Renderer, plain, read_answer, read_prompt
from dora_rl.data.rows import Rows, open_rows
from dora_rl.model.tokenizer import Tokenizer
from dora_rl.types import Prompt, UserError

# A file up to this many rows is checked row by row even where no length limit asks for it.
CHECK_ALL_ROWS_MAX = 20_000
# A train prompt is compared with evaluation prompts over this many rows of an endless source.
DISJOINT_ROWS_MAX = 2_000
ANSWER_ROWS_MAX = 200_000  # of one source, looked through for rows without an answer
RECENT = 1024  # prompts kept, as they were made
DEFAULT_SPLITS = {"train": "train", "eval": "test"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt comes from: `row` counts the source's rows as stored."""

    source: int
    epoch: int
    row: int


@dataclass(frozen=True, slots=True)
class OpenSource:
    """One source, opened and filtered. `kept` lists the rows within the length limit, or is None
    where all are."""

    config: DataSource
    split: str
    rows: Rows
    kept: Sequence[int] | None
    num_too_long: int

    @property
    def num_kept(self) -> int | None:
        return self.rows.num_rows if self.kept is None else len(self.kept)

    def row_number(self, place: int) -> int:
        return place if self.kept is None else self.kept[place]


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
        self.sources = tuple(sources)
        self._config = config
        self._renderer = renderer
        self._interleave = Interleave.of([source.config.weight for source in sources])
        self._recent = lru_cache(RECENT)(self._make)  # asked for again with every sample of it

    def prompt(self, index: int) -> Prompt:
        """The prompt at a place of the endless stream."""
        return self._recent(index)

    def _make(self, index: int) -> Prompt:
        place = self.place(index)
        return self._render(index, self.sources[place.source], place.row)

    def place(self, index: int) -> Place:
        assert index >= 0, f"prompt index {index}"
        number, draw = self._interleave.place(index)
        source = self.sources[number]
        if source.num_kept is None:
            return Place(number, 0, draw)
        epoch, offset = divmod(draw, source.num_kept)
        if self._config.shuffle:
            key = epoch_key(self._config.seed, number, epoch)
            offset = permute(offset, source.num_kept, key)
        return Place(number, epoch, source.row_number(offset))

    @property
    def num_prompts(self) -> int | None:
        """Kept rows of all sources together; None if one of them is endless."""
        counts = [source.num_kept for source in self.sources]
        return None if None in counts else sum(count for count in counts if count is not None)

    def once(self, limit: int | None = None) -> Iterator[Prompt]:
        """Every kept row once, source by source in stored order (an evaluation set).

        `limit` is a number per source; an endless source needs one.
        """
        index = 0
        for source in self.sources:
            count = source.num_kept
            if count is None and limit is None:
                raise UserError(
                    f"data: {source.config.path} never ends; give the evaluation a size"
                )
            count = min(n for n in (count, limit) if n is not None)
            for place in range(count):
                yield self._render(index, source, source.row_number(place))
                index += 1

    def check(self) -> None:
        """Make the first prompts of every source, so that bad input fails before a run starts."""
        for source in self.sources:
            count = min(self._config.check_rows, source.num_kept or self._config.check_rows)
            for place in range(count):
                self._render(place, source, source.row_number(place))

    def without_answer(self) -> Unanswered:
        """Rows that have no answer, or an empty one. Of an endless source the first are looked at,
        of a long one the first `ANSWER_ROWS_MAX`."""
        num, num_looked, first = 0, 0, ""
        for source in self.sources:
            count = min(source.num_kept or self._config.check_rows, ANSWER_ROWS_MAX)
            for place in range(count):
                row = source.row_number(place)
                where = source.rows.where(row)
                answer = read_answer(source.rows.row(row), source.config, where)
                if answer is None or not answer.strip():
                    num, first = num + 1, first or where
            num_looked += count
        return Unanswered(num, num_looked, first)

    def fingerprint(self) -> str:
        """Changes when the stream does, so that a resumed run can notice other data.

        Covers the configuration, the number of rows and three rows of each source.
        """
        parts: list[object] = [self._config.seed, self._config.shuffle]
        for source in self.sources:
            count = source.rows.num_rows or 3
            samples = [source.rows.row(i) for i in sorted({0, count // 2, count - 1})]
            kept = source.num_kept
            parts.append([source.config.model_dump(), source.split, count, kept, plain(samples)])
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def describe(self) -> list[str]:
        """One line per source, for `dora-rl check` and the log."""
        return [
            f"{source.config.path}: {_count(source.rows.num_rows)} rows, "
            f"{source.num_too_long} too long, weight {source.config.weight:g}"
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
    entries = config.train if part == "train" else config.eval
    if not entries:
        raise UserError(f"data.{part} is empty; give a file, a directory or package.module:name")
    renderer = Renderer(config, tokenizer)
    sources = []
    for entry in entries:
        split = entry.split or DEFAULT_SPLITS[part]
        place, key = Path(base_dir), f"data.{part}"
        rows = open_rows(entry, split=split, seed=config.seed, base_dir=place, key=key)
        sources.append(_filter(OpenSource(entry, split, rows, None, 0), config, renderer))
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


def _filter(source: OpenSource, config: DataConfig, renderer: Renderer) -> OpenSource:
    """Look at every row: refuse a bad one, leave out one that is too long."""
    rows, entry = source.rows, source.config
    if rows.num_rows is None or (
        not config.prompt_tokens_max and rows.num_rows > CHECK_ALL_ROWS_MAX
    ):
        return source
    kept = array("q")
    for i in range(rows.num_rows):
        if renderer.fits(rows.row(i), entry, rows.where(i)):
            kept.append(i)
    if not kept:
        raise UserError(
            f"data: all {rows.num_rows} prompts of {entry.path} are longer than "
            f"data.prompt_tokens_max = {config.prompt_tokens_max} tokens; raise it"
        )
    num_too_long = rows.num_rows - len(kept)
    return OpenSource(entry, source.split, rows, kept if num_too_long else None, num_too_long)


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


def _count(num_rows: int | None) -> str:
    return "endless" if num_rows is None else str(num_rows)
