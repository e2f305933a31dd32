"""What a run trains on: [data], [reward] and [env].

Only says what is wanted; the rooms of the same names find files, functions and classes. Nothing
here performs work.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from dora_rl.config.section import STRINGS_ARE_NAMES, STRINGS_ARE_PATHS, Section


class DataSource(Section):
    """One entry of `data.train` or `data.eval`. A plain string stands for its `path`."""

    path: str = Field(min_length=1)
    """Where the rows are: a .jsonl, .json or .parquet file, a directory of those, a directory that
    `datasets` saved, or a Hugging Face id. Code that makes rows is written `package.module:name` or
    `path/to/file.py:name`."""
    weight: float = Field(default=1.0, gt=0)
    """How often prompts are drawn from this source, relative to the weights of the other
    sources."""
    name: str = ""
    """The name of the source in the metrics. If empty, its path is used."""
    split: str = ""
    """The split of the dataset to read. If empty, `train` is read for training and `test` for
    evaluation."""
    subset: str = ""
    """The subset (configuration) of a Hugging Face dataset. If empty, its default one is read."""
    prompt_column: str = "prompt"
    """The column that holds the prompt: a string, or a list of messages with role and content."""
    answer_column: str = ""
    """The column that holds the right answer; dots lead into nested columns. If empty, the first of
    answer, ground_truth, solution, label and reward_model.ground_truth is taken."""
    answer_after: str = ""
    """A mark in the answer column: what follows its last occurrence is the answer, with commas
    taken out of numbers (`####` for GSM8K). If empty, the whole column is the answer."""
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Keyword arguments for a source that is code."""
    env: str = ""
    """The label of the environment that plays these prompts. It may stay empty where there is only
    one environment, or none."""
    prompt_tokens: Literal["all", "first"] = "all"
    """How much of the prompt a trajectory begins with. `first` gives its first token alone, for an
    agent that writes its own prompt."""


class DataConfig(Section):
    """[data] where prompts come from."""

    train: Annotated[tuple[DataSource, ...], STRINGS_ARE_PATHS] = ()
    """The sources of training prompts: paths, or tables with a path; see below."""
    eval: Annotated[tuple[DataSource, ...], STRINGS_ARE_PATHS] = ()
    """The sources of held-out prompts for evaluations, in the same form. If empty, nothing is
    evaluated."""
    seed: int = 0
    """The seed of the order in which prompts come."""
    shuffle: bool = True
    """Whether every epoch of a source comes in a new random order. If off, rows come as stored."""
    prompt_tokens_max: int = Field(default=1024, ge=0)
    """The longest prompt in tokens. Longer ones are left out and counted; 0 means no limit."""
    chat: Literal["auto", "always", "never"] = "auto"
    """What goes through the chat template. With `auto`, message lists do and strings stay as they
    are. With `always`, a string becomes a user message. With `never`, message lists are an
    error."""
    system_prompt: str = ""
    """A system message that is put before every conversation that does not begin with one."""
    template_options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Extra arguments for the chat template."""
    check_rows: int = Field(default=256, ge=1)
    """How many rows of an endless source are looked at before the run starts."""
    check_disjoint: bool = True
    """Whether a run refuses to start when an evaluation prompt is also a training prompt."""


class RewardFunction(Section):
    """One entry of `reward.functions`. A plain string stands for its `name`."""

    name: str = Field(min_length=1)
    """The function: `path/to/file.py:name`, `package.module:name`, or one of the built-in ones,
    which are exact, regex, math, format, length, code, judge and model."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """The factor of this function's score in the sum."""
    label: str = ""
    """The name of this function in the metrics. If empty, its `name` is used."""
    form: Literal["auto", "trl", "verl", "verifiers", "plain"] = "auto"
    """The convention by which the function takes its arguments. `auto` finds it by the names of the
    parameters."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a built-in, or keyword arguments for a function of your own."""
    cache: bool | None = None
    """Whether scores of equal samples are remembered. If not set, only dear scores are: those of
    code, judge and model."""


class RewardConfig(Section):
    """[reward] what responses are worth: the weighted sum of `functions`."""

    functions: Annotated[tuple[RewardFunction, ...], STRINGS_ARE_NAMES] = ()
    """The functions that score a response: names, or tables with a name; see below."""
    timeout_s: float = Field(default=30.0, gt=0)
    """How many seconds one call of one function may take."""
    attempts: int = Field(default=0, ge=0)
    """How often a call that raises or times out is tried. 0 means three times for asynchronous
    functions and the judge, and once for the others."""
    retry_wait_s: float = Field(default=0.5, ge=0)
    """The pause in seconds before a second try. It grows with each further one."""
    num_workers: int = Field(default=1, ge=1)
    """The number of processes that score."""
    concurrent_max: int = Field(default=16, ge=1)
    """How many asynchronous calls one worker has under way at once."""
    cache_entries_max: int = Field(default=65536, ge=0)
    """How many scores each worker remembers for each function. 0 means none."""

    @property
    def worker_timeout_s(self) -> float:
        """All tries of all functions: a worker that takes longer over one sample hangs."""
        tries = self.attempts or 3
        one_s = tries * (self.timeout_s + self.retry_wait_s * tries)
        return max(1, len(self.functions)) * one_s + 10.0


class EnvironmentEntry(Section):
    """One entry of `env.environments`. A plain string stands for its `name`."""

    name: str = Field(min_length=1)
    """The environment: one of the built-in ones (agent, calculator, guess, single_turn),
    `package.module:Name` or `path/to/file.py:Name`."""
    label: str = ""
    """What `data.train[].env` and the records call this environment. If empty, its `name` is
    used."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments for the constructor of the environment."""
    weight: float = Field(default=1.0, gt=0)
    """How often prompts of this environment come, relative to the weights of the others."""
    turns_max: int = Field(default=8, ge=1)
    """The most turns of one episode. It ends as it is when they are used up."""
    timeout_s: float = Field(default=60.0, gt=0)
    """How many seconds one reset or one step may take."""
    concurrent_max: int = Field(default=256, ge=1)
    """How many steps of this environment are under way at once, over all workers."""
    latency_s: tuple[float, float] = (0.0, 0.0)
    """For tests: the least and the most seconds that are waited before each step."""


class EnvConfig(Section):
    """[env] multi-turn environments; without one, every run has a single turn."""

    environments: Annotated[tuple[EnvironmentEntry, ...], STRINGS_ARE_NAMES] = ()
    """The environments that a run plays: names, or tables with a name; see below."""
    num_workers: int = Field(default=1, ge=1)
    """The number of processes that hold environments."""
    slots_factor: float = Field(default=2.0, ge=1)
    """How many requests an instance takes for each one that it decodes at once. Those beyond wait
    for their environment meanwhile."""
