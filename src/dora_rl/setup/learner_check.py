"""What the learner would refuse after the start, found before it: model, losses, schedules.

Imports torch only for a loss or an advantage of the user's and for a device that is named.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from dora_rl.config import AlgorithmConfig, RunConfig, TrainerConfig
from dora_rl.config.section import choose
from dora_rl.model.directory import check_files, read_spec
from dora_rl.model.names import LINEAR_LAYERS, places_of
from dora_rl.model.spec import NotSupported
from dora_rl.setup.token_ids import first_difference
from dora_rl.trainer.checks import check_attention, check_published, check_trainer
from dora_rl.trainer.losses.recipes import fill, is_users_own
from dora_rl.types import UserError
from dora_rl.user_code import require

WITHIN_GROUP = ("group", "group_mean", "leave_one_out")


def check_learner(config: RunConfig) -> None:
    """Losses, sampling, schedules, adapters and the reference."""
    algorithm, trainer = config.algorithm, config.trainer
    _check_sampling(config, fill(algorithm))
    check_trainer(trainer)
    _check_adapters(config, trainer)
    _check_experts(config)
    if trainer.reference_model:
        _check_reference(config, Path(trainer.reference_model))
    _check_teacher(config, fill(algorithm))
    if is_users_own(algorithm.loss) or is_users_own(algorithm.advantage or ""):
        _try_own(algorithm, config.rollout.num_samples)


def _check_sampling(config: RunConfig, algorithm: AlgorithmConfig) -> None:
    """The learner's log-probs are of the policy that sampled: docs/algorithms.md says why.

    The learner takes the softmax over the whole vocabulary at one temperature. What was sampled
    otherwise has ratios far from 1 before anything is learned. An advantage within a group of one
    is always zero.
    """
    rollout, own = config.rollout, config.algorithm.temperature
    against_rollout = algorithm.old_logprobs == "rollout" or algorithm.corrections
    require(
        *(
            (
                value == off,
                f"rollout.{key} = {value:g}: the learner's log-probs are over the whole vocabulary "
                "and those of truncated sampling are not, so every ratio would be wrong; train "
                f"with {off:g} (`dora-rl eval` and `serve` may truncate)",
            )
            for key, value, off in (
                ("top_k", rollout.top_k, 0),
                ("top_p", rollout.top_p, 1.0),
                ("min_p", rollout.min_p, 0.0),
            )
        ),
        (
            rollout.temperature != 0,
            "rollout.temperature = 0: greedy responses are no samples of a policy, and those of a "
            "group are all the same; train with a temperature above 0 (evaluations are greedy too)",
        ),
        (
            own in (0, rollout.temperature) or not against_rollout,
            f"algorithm.temperature = {own:g}: ratios to the rollout's log-probs, which are "
            f"at rollout.temperature = {rollout.temperature:g}, would be wrong; leave it out, or "
            "set algorithm.old_logprobs = 'behaviour' or 'proximal' and no algorithm.corrections",
        ),
        (
            rollout.num_samples > 1 or algorithm.advantage not in WITHIN_GROUP,
            f"rollout.num_samples = 1: the advantage {algorithm.advantage!r} compares the samples "
            "of a group, so it would be 0 and nothing learned; give 2 or more, or "
            "algorithm.advantage = 'batch' or 'gae'",
        ),
    )


def _try_own(algorithm: AlgorithmConfig, group_size: int) -> None:
    """A loss and an advantage of the user's, on a made-up batch."""
    from dora_rl.trainer.losses.registry import resolve
    from dora_rl.trainer.losses.trial import try_advantage, try_loss

    objective = resolve(algorithm)
    if is_users_own(objective.options.loss):
        try_loss(objective)
    if is_users_own(objective.options.advantage or ""):
        try_advantage(objective, group_size)


def describe_own(section: AlgorithmConfig) -> list[str]:
    """The functions of the user's own that `check_learner` has tried, with their arguments."""
    named = (
        ("loss", section.loss, section.loss_args),
        ("advantage", section.advantage or "", section.advantage_args),
    )
    return [
        f"{key} {name}: tried on a made-up batch"
        + "".join(f", {word} = {value}" for word, value in args.items())
        for key, name, args in named
        if is_users_own(name)
    ]


def check_learner_device(config: RunConfig, device: str) -> None:
    """`device`: the run's, which the learner takes where trainer.device is auto."""
    trainer = config.trainer
    name = trainer.device if trainer.device != "auto" else device
    on_gpu = name.startswith("cuda")
    if on_gpu and not device.startswith("cuda"):
        from dora_rl.trainer.policy.model import pick_device

        pick_device(name)
    check_attention(trainer.attention, on_gpu=on_gpu, dtype=trainer.compute_dtype)
    check_published(trainer.compute_dtype, trainer.publish_dtype, on_gpu=on_gpu)


def _check_adapters(config: RunConfig, trainer: TrainerConfig) -> None:
    if not trainer.lora_rank:
        return
    # The layers of the blocks: neither learner nor instances have an adapter for the output matrix.
    spec = read_spec(config.model.path)
    known = tuple(dict.fromkeys(module.rpartition(".")[2] for module in places_of(spec)))
    for target in trainer.lora_targets:
        require(
            (
                spec.moe is None or target in known or target not in LINEAR_LAYERS,
                f"trainer.lora_targets: {target} is a layer of the experts here, and those carry "
                f"no adapters; name layers of attention: {', '.join(known)}",
            )
        )
        choose("layer in trainer.lora_targets", target, known)


def _check_experts(config: RunConfig) -> None:
    """Where a replay or a balance is asked for, there are experts that can be told."""
    trainer = config.trainer
    asked = {"replay = 'on'": trainer.router_replay == "on"}
    asked[f"aux_coef = {trainer.router_aux_coef:g}"] = trainer.router_aux_coef > 0
    for key in (f"trainer.router_{name}" for name, is_so in asked.items() if is_so):
        spec = read_spec(config.model.path)
        lean = trainer.implementation != "transformers" and spec.rope.kind != "yarn"
        require(
            (spec.moe is not None, f"{key}: the model has no experts; leave it out"),
            (
                lean,
                f"{key}: transformers runs this model, and its routers are its own; leave it out",
            ),
        )
    require(
        (
            trainer.router_replay != "on" or config.rollout.backend == "native",
            "trainer.router_replay = 'on': vLLM does not say which experts a token went to; set "
            "rollout.backend = 'native', or leave it at 'auto'",
        )
    )


def describe_experts(config: RunConfig, device: str) -> list[str]:
    """Of a mixture of experts: whether the learner goes where the engine went."""
    trainer = config.trainer
    try:
        if read_spec(config.model.path).moe is None:
            return []
    except NotSupported:
        return []
    lines = ["experts: each token trains where it went when it was sampled"]
    if not config.records_routing(device):
        on_gpu = trainer.router_replay == "auto" and config.rollout.backend == "native"
        hint = "; on a GPU set trainer.router_replay = 'on'" if on_gpu and device != "cpu" else ""
        lines = [f"experts: the learner's routers choose anew (no replay{hint})"]
    elif config.rollout.speculation == "on" and device != "cpu":
        lines += ["rollout.speculation: on a GPU nothing is guessed where experts are recorded"]
    if trainer.lora_rank:
        lines += ["experts and routers carry no adapters and stay as they are"]
    return lines


def _check_reference(config: RunConfig, path: Path) -> None:
    check_weights(path, "trainer.reference_model")
    policy, reference = read_spec(config.model.path), read_spec(path)
    if policy.vocab != reference.vocab:
        raise UserError(
            f"trainer.reference_model: {path} has {reference.vocab} tokens, "
            f"the model has {policy.vocab}; give one with the same tokenizer"
        )


def _check_teacher(config: RunConfig, algorithm: AlgorithmConfig) -> None:
    held, alone = config.trainer.teacher_model, algorithm.advantage == "none"
    served = config.reward.teacher_url
    require(
        (
            held or served or not algorithm.distill_coef,
            f"algorithm.distill_coef = {algorithm.distill_coef or 0:g} needs a teacher: set "
            "trainer.teacher_model or reward.teacher_url",
        ),
        (
            not (held and served),
            "trainer.teacher_model and reward.teacher_url are two teachers; keep one",
        ),
        (
            held or algorithm.distill_in == "advantage" or not algorithm.distill_coef,
            "algorithm.distill_in = 'loss' needs whole distributions, and reward.teacher_url gives "
            "log-probs of the sampled tokens alone; set trainer.teacher_model",
        ),
        (
            not (alone and config.orchestration.filter_equal),
            "orchestration.filter_equal would leave out groups for rewards that do not count: with "
            "algorithm.advantage = 'none' every sample teaches; set it to false",
        ),
    )
    if served:
        _check_served(config, served)
    if not held:
        return
    key, path, model = "trainer.teacher_model", Path(held), Path(config.model.path)
    check_weights(path, key)
    policy, teacher = read_spec(model), read_spec(path)
    differs = first_difference(model, path)
    require(
        (
            teacher.vocab >= policy.vocab,
            f"{key}: {path} has {teacher.vocab} tokens, the model has {policy.vocab}; give one "
            "with the same tokenizer",
        ),
        (
            not differs,
            f"{key}: the tokenizer of {path} is another one: {differs}; give one with the same",
        ),
    )


def _check_served(config: RunConfig, url: str) -> None:
    temperature, world = config.rollout.temperature, config.runtime.world
    require(
        (
            urlsplit(url).scheme in ("http", "https"),
            f"reward.teacher_url: {url!r} must begin with http:// or https://",
        ),
        (config.reward.teacher_name, "reward.teacher_name is empty: say which model to ask"),
        (
            temperature == 1.0,
            f"rollout.temperature = {temperature:g}: the log-probs of reward.teacher_url are at "
            "temperature 1, and those of the policy would not be; set it to 1, or "
            "trainer.teacher_model, which is scored at any",
        ),
        (
            world != "cluster",
            "reward.teacher_url: not yet with runtime.world = 'cluster'; set trainer.teacher_model",
        ),
    )


def check_weights(path: Path, key: str) -> None:
    """A Hugging Face directory of a known architecture with whole safetensors. `key` named it."""
    if not path.is_dir():
        raise UserError(
            f"{key}: {path} is not a directory with a Hugging Face model; give its path, or "
            f"fetch one with: hf download ID --local-dir DIR"
        )
    spec = read_spec(path)
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{key}: no *.safetensors in {path}; convert the model to safetensors")
    check_files(path, spec)


def check_model_files(path: Path) -> None:
    """The model to train: weights and a tokenizer."""
    check_weights(path, "model.path")
    if not any(path.glob("tokenizer*")) and not any(path.glob("vocab*")):
        raise UserError(f"model.path: no tokenizer in {path}; copy tokenizer.json into it")
