"""Lines for the users of the Python API: what a refusal of the command line's words says to them,
what a keyword of another framework is called here, and where a function that raised is mended."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from dora_rl.config import RunConfig
from dora_rl.controller.run_dir import GIVEN
from dora_rl.types import UserError

# Keywords of TRL and of verl, and what is given here. The pages docs/coming_from_*.md say more.
KNOWN_AS = {
    "learning_rate": "trainer__lr",
    "lr_scheduler_type": "trainer__schedule",
    "warmup_steps": "trainer__warmup_updates",
    "max_grad_norm": "trainer__grad_norm_max",
    "num_generations": "rollout__num_samples",
    "max_completion_length": "rollout__tokens_max",
    "max_prompt_length": "data__prompt_tokens_max",
    "per_device_train_batch_size": "orchestration__batch_groups",
    "gradient_accumulation_steps": "orchestration__batch_groups",
    "max_steps": "orchestration__num_steps",
    "num_iterations": "trainer__updates_per_step",
    "steps_per_generation": "trainer__updates_per_step",
    "beta": "algorithm__kl_coef",
    "epsilon": "algorithm__clip_low",
    "epsilon_high": "algorithm__clip_high",
    "loss_type": "algorithm__loss",
    "scale_rewards": "algorithm__advantage",
    "use_vllm": "rollout__backend",
    "peft_config": "trainer__lora_rank",
    "gradient_checkpointing": "trainer__activation_checkpointing",
    "eval_steps": "evaluation__every_steps",
    "save_steps": "checkpoint__every_steps",
    "save_total_limit": "checkpoint__keep",
    "report_to": "logging__sinks",
    "train_dataset": "data",
    "eval_dataset": "eval_data",
    "reward_funcs": "reward",
    "output_dir": "run_dir",
    "train_files": "data",
    "val_files": "eval_data",
    "max_response_length": "rollout__tokens_max",
    "train_batch_size": "orchestration__batch_groups",
    "n": "rollout__num_samples",
    "tensor_model_parallel_size": "resources__devices_per_instance",
    "gpu_memory_utilization": "rollout__kv_bytes_max",
    "ppo_mini_batch_size": "trainer__updates_per_step",
    "clip_ratio_low": "algorithm__clip_low",
    "clip_ratio_high": "algorithm__clip_high",
    "kl_loss_coef": "algorithm__kl_coef",
    "entropy_coeff": "algorithm__entropy_coef",
    "loss_agg_mode": "algorithm__aggregation",
    "adv_estimator": "algorithm__advantage",
    "filter_groups": "orchestration__filter_equal",
    "n_gpus_per_node": "resources__learner_ranks",
    "total_training_steps": "orchestration__num_steps",
    "save_freq": "checkpoint__every_steps",
    "test_freq": "evaluation__every_steps",
    "logger": "logging__sinks",
    "staleness_threshold": "orchestration__max_staleness",
}
_IN_WORDS = {
    "add --resume, or set runtime.run_dir=DIRECTORY": (
        "go on with dora_rl.Run(run_dir).resume(), or give another run_dir"
    ),
    "--step": "step",
}


def known_as(key: str) -> str:
    """What a dotted key of another framework is called here; empty: nothing that is known."""
    sections = RunConfig.model_fields
    first, _, rest = key.partition(".")
    own = rest and first in sections and rest in _fields(first)
    return "" if own else KNOWN_AS.get(key.rpartition(".")[2], "")


def sections_with(name: str) -> list[str]:
    """The keys of that name."""
    return [f"{section}__{name}" for section in RunConfig.model_fields if name in _fields(section)]


def _fields(section: str) -> dict[str, object]:
    return getattr(RunConfig.model_fields[section].annotation, "model_fields", {})


@contextlib.contextmanager
def in_words_of_python() -> Iterator[None]:
    """Refusals that speak of the command line's flags speak of arguments instead."""
    try:
        yield
    except UserError as error:
        text = str(error)
        for flag, words in _IN_WORDS.items():
            text = text.replace(flag, words)
        if text == str(error):
            raise
        raise UserError(text) from None


def mending(config: RunConfig, reason: str | None = None) -> str:
    """`mend NAME in FILE`: of the functions that were given as objects those that `reason` names,
    or all; empty: none."""
    folder = Path(config.runtime.run_dir) / GIVEN
    named = [(one.name, f"reward {one.label}") for one in config.reward.functions]
    named += [(one.name, f"environment {one.label}") for one in config.env.environments]
    named += [(spec or "", spec) for spec in (config.algorithm.loss, config.algorithm.advantage)]
    places: list[str] = []
    for spec, said in named:
        file, _, name = spec.rpartition(":")
        meant = reason is None or re.search(rf"{re.escape(said or spec)}\b", reason)
        if Path(file).parent == folder and meant:
            places.append(f"{name} in {_origin(Path(file), name)}")
    return f"mend {' and '.join(dict.fromkeys(places))}" if places else ""


def _origin(file: Path, name: str) -> str:
    """The file that was written, or the module that it imports the function from."""
    text = file.read_text() if file.is_file() else ""
    line = re.search(rf"^from (\S+) import (?:\w+ as )?{name}$", text, re.MULTILINE)
    return f"module {line[1]}" if line else str(file)
