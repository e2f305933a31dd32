"""Everything that can be wrong is found here, before anything starts.

Imports neither torch nor transformers unless the model or the machine calls for them, so that a
mistake is answered in a second. `check_data` is what `dora-rl check` shows of data and reward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dora_rl.config import DataSource, RewardConfig, RunConfig
from dora_rl.controller.sinks import check_sinks
from dora_rl.data.prompts import PromptSource, open_data
from dora_rl.engine.options import EngineOptions
from dora_rl.envs.host import PACKAGED, PACKAGED_ROWS, label_of, load_environments
from dora_rl.model.directory import read_spec
from dora_rl.observe.eval_figures import SCORES
from dora_rl.rewards.base import build
from dora_rl.setup.layout import Layout, plan_layout
from dora_rl.setup.learner_check import (
    check_learner,
    check_learner_device,
    check_model_files,
    describe_experts,
    describe_own,
)
from dora_rl.setup.plan import memory_problems, with_memory
from dora_rl.setup.token_ids import check_served
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.types import UserError
from dora_rl.workers.engines import check_backend, check_guesses


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that can start."""

    config: RunConfig
    layout: Layout
    train: PromptSource
    evaluation: PromptSource | None
    decode: Callable[[Sequence[int]], str]

    def check_memory(self) -> None:
        """Refuse a run whose GPUs are too small, with what to change."""
        if problems := memory_problems(self.config, self.layout):
            raise UserError(problems[0])

    def describe(self) -> list[str]:
        o, layout = self.config.orchestration, self.layout
        return [
            f"mode {o.mode.value}, K = {o.max_staleness}, {o.num_steps} steps of "
            f"{o.batch_groups} groups x {self.config.rollout.num_samples} samples",
            f"{len(layout.instances)} instances on {layout.device}, up to "
            f"{layout.resident_max} versions each; learner with {layout.learner_threads} threads",
            *self.train.describe(),
            *describe_own(self.config.algorithm),
            *describe_experts(self.config, layout.device),
            *_describe_environments(self.config),
            f"run directory {self.config.runtime.run_dir}",
        ]


def prepare(config: RunConfig) -> Prepared:
    """Open model, data and rewards; a mistake in any of them is one line."""
    path = Path(config.model.path)
    check_model_files(path)
    check_sinks(config.logging.sinks, config.logging.sink_options)
    check_learner(config)
    config = with_environments(config)
    reward = build(config.reward, Path(".")) if config.reward.functions else None
    if reward is None and not config.env.environments:
        raise UserError("reward.functions is empty; give path/to/file.py:name or a built-in")
    tokenizer = open_tokenizer(path, config.model.trust_remote_code)
    train, evaluation = open_data(config.data, tokenizer, ".")
    config = with_pools(config, train)
    if reward is not None:
        check_columns(reward.missing(train.prompt(0).columns), config.reward)
        reward.close()
    check_best_metric(config)
    check_backend(config)
    device = choose_device(config.runtime.device)
    check_guesses(config, device)
    layout = with_memory(config, plan_layout(config, device))
    check_learner_device(config, layout.device)
    engine = EngineOptions(**config.engine_options(layout.device, layout.resident_max))
    check_context(config, engine, len(train.prompt(0).token_ids))
    if config.reward.teacher_url:
        check_served(config.reward, train.prompt(0).token_ids, tokenizer.decode)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return Prepared(config, layout, train, evaluation, decode)


def check_columns(missing: Sequence[str], section: RewardConfig) -> None:
    """What a reward cannot do without, the data must have."""
    if missing:
        raise UserError(
            f"reward.functions: {', '.join(f.name for f in section.functions)}: "
            f"the data have no column {missing[0]!r}; "
            "add it to the rows of data.train or rename the argument"
        )


def check_context(config: RunConfig, engine: EngineOptions, prompt_tokens: int) -> None:
    """A prompt and its response have room, the first one at least."""
    spec = read_spec(config.model.path)
    engine.check_model(spec)
    context = engine.context_limit(spec.context_max)
    if prompt_tokens >= context:
        raise UserError(
            f"data.train: a prompt of {prompt_tokens} tokens leaves no room in the context of "
            f"{context}; data.prompt_tokens_max leaves out longer prompts"
        )
    if (tokens := prompt_tokens + config.rollout.tokens_max) > context:
        raise UserError(
            f"rollout.tokens_max: a prompt of {prompt_tokens} tokens and a response of "
            f"{config.rollout.tokens_max} exceed the context of {context}; lower it to "
            f"{context} less the longest prompt"
        )
    if config.rollout.backend == "native" and engine.kv_bytes_max:
        # As the engine counts: one block is kept for the next token.
        room = (engine.blocks_in(engine.kv_bytes_max, spec) - 1) * engine.block_tokens
        if tokens > room:
            raise UserError(
                f"rollout.kv_bytes_max: {engine.kv_bytes_max} bytes hold requests of {room} tokens "
                f"at most; a prompt of {prompt_tokens} and its response have {tokens}"
            )


def check_best_metric(config: RunConfig) -> None:
    """The best checkpoint is chosen by a figure that evaluations have."""
    metric = config.checkpoint.best_metric
    if config.checkpoint.keep_best and metric.removeprefix("eval/") not in SCORES:
        raise UserError(
            f"checkpoint.best_metric: {metric!r} is not measured; "
            f"give one of {', '.join(f'eval/{name}' for name in SCORES)}"
        )


def _describe_environments(config: RunConfig) -> list[str]:
    return [
        f"environment {entry.label or entry.name}: up to {entry.turns_max} turns of "
        f"{entry.timeout_s:g} s, {entry.concurrent_max} at once, {config.env.num_workers} workers"
        for entry in config.env.environments
    ]


def with_environments(config: RunConfig) -> RunConfig:
    """Load the environments, and mix the training data by their weights.

    The sources of an environment share its weight in proportion to their own.
    """
    if not (loaded := load_environments(config.env)):
        if named := [s.path for s in (*config.data.train, *config.data.eval) if s.env]:
            raise UserError(f"data: {named[0]} names an environment, and env.environments is empty")
        return config
    config = with_own_rows(config)
    for source in config.data.eval:
        label_of(source.env, loaded)
    labels = [label_of(source.env, loaded) for source in config.data.train]
    totals = dict.fromkeys(labels, 0.0)
    for label, source in zip(labels, config.data.train, strict=True):
        totals[label] += source.weight
    if len(totals) < 2:
        return config
    # Rounded, so that a run that is resumed from its own resolved configuration has the same.
    mixed = tuple(
        source.model_copy(
            update={"weight": round(loaded[label].entry.weight * source.weight / totals[label], 9)}
        )
        for label, source in zip(labels, config.data.train, strict=True)
    )
    return config.changed("data", train=mixed)


def with_own_rows(config: RunConfig) -> RunConfig:
    """Environments of other packages have prompts of their own, where the data name none."""
    data, entries = config.data, config.env.environments
    if data.train or not all(entry.name.partition(":")[0] in PACKAGED for entry in entries):
        return config
    own = tuple(
        DataSource(
            path=PACKAGED_ROWS,
            name=entry.label or entry.name,
            env=entry.label or entry.name,
            options={"name": entry.name, "options": entry.options},
            # A conversation of verifiers begins with the tools that its environment has.
            prompt_tokens="first" if entry.name.startswith("verifiers:") else "all",
        )
        for entry in entries
    )
    # The prompt of a game says nothing of what it hides: all are alike.
    games = any(entry.name.startswith(("textarena:", "openenv:")) for entry in entries)
    disjoint = data.check_disjoint and not games
    return config.changed("data", train=own, eval=data.eval or own, check_disjoint=disjoint)


def with_pools(config: RunConfig, train: PromptSource) -> RunConfig:
    """The core is told by the configuration how many pools of prompts there are."""
    if not train.num_pools:
        return config
    return config.changed("data", curriculum_pools=train.num_pools // len(train.sources))


def choose_device(wanted: str, key: str = "runtime.device") -> str:
    """`auto` is a GPU where there is one. Torch is imported only where the system shows one."""
    shows_gpu = any(Path(place).exists() for place in ("/proc/driver/nvidia", "/dev/nvidiactl"))
    if wanted == "cpu" or (wanted == "auto" and not shows_gpu):
        return "cpu"
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"{key}: {wanted} is asked for and torch sees no GPU")
    return wanted


PROMPT_CHARS_MAX = 2_000


@dataclass(slots=True)
class DataCheck:
    """What was found; `problems` are lines for the user."""

    evaluation: list[str] = field(default_factory=list[str])  # a line for each source
    first_prompt: str = ""  # as the model reads it
    first_prompt_tokens: int = 0
    first_answer: str | None = None
    rewards: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])

    def lines(self) -> list[str]:
        shown = self.first_prompt[:PROMPT_CHARS_MAX]
        left_out = len(self.first_prompt) - len(shown)
        return [
            *self.evaluation,
            *self.rewards,
            f"the first training prompt as the model reads it, {self.first_prompt_tokens} tokens:",
            *(f"  | {line}" for line in shown.split("\n")),
            *([f"  | ... {left_out} characters more"] if left_out else []),
            f"its answer: {'none' if self.first_answer is None else repr(self.first_answer)}",
        ]


def check_data(
    config: RunConfig, train: PromptSource, evaluation: PromptSource | None
) -> DataCheck:
    first = train.prompt(0)
    found = DataCheck(
        first_prompt=first.text,
        first_prompt_tokens=len(first.token_ids),
        first_answer=first.answer,
        evaluation=_describe_evaluation(config, evaluation),
    )
    if config.reward.functions:
        with closing(build(config.reward, Path("."))) as reward:
            found.rewards = reward.describe()
            found.problems = _unanswered(reward.needing_answer(), train, evaluation)
    return found


def check_answers(config: RunConfig, train: PromptSource, evaluation: PromptSource | None) -> None:
    """Refuse rows without an answer where a reward needs one, with the line of `check`."""
    if problems := check_data(config, train, evaluation).problems:
        raise UserError(problems[0])


def _unanswered(
    needing: list[str], train: PromptSource, evaluation: PromptSource | None
) -> list[str]:
    sources = {"train": train, "eval": evaluation} if needing else {}
    return [
        f"data.{name}: {missing.num} of {missing.num_looked} rows have no answer, and "
        f"{', '.join(needing)} needs one; the first is {missing.first}; fill them in, "
        "leave them out, or set answer_column"
        for name, source in sources.items()
        if source is not None and (missing := source.without_answer()).num
    ]


def _describe_evaluation(config: RunConfig, evaluation: PromptSource | None) -> list[str]:
    if evaluation is None:
        return ["no evaluation: data.eval is empty"]
    section, there = config.evaluation, evaluation.num_prompts
    used = section.num_prompts if there is None else min(there, section.num_prompts)
    every = f", every {section.every_steps} steps" if section.every_steps else ""
    return [
        *(f"evaluation: {line}" for line in evaluation.describe()),
        f"evaluation of the first {used} prompts, 1 greedy and {section.num_samples} sampled "
        f"answers each, before the first step and after the last{every}",
    ]
