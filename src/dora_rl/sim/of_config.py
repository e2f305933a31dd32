"""A testbed made of a configuration, or of a run: its model, batch, bound and lengths.

The devices are the datasheet GPU of the presets, as many as the configuration has instances and
learner ranks: what is compared are settings, not this machine. Of a run the lengths are those of
its trained samples; of a configuration alone they are not known, and taken as log-normal with a
mean of a quarter of `rollout.tokens_max`. `--set` changes any of it.
"""

from __future__ import annotations

from pathlib import Path

from dora_rl.config import RunConfig
from dora_rl.data.lengths import Empirical, LengthModel, LogNormal
from dora_rl.io.append_log import read_lines
from dora_rl.model.directory import read_spec
from dora_rl.model.spec import ModelSpec
from dora_rl.setup.hub import local_model
from dora_rl.setup.memory import num_params
from dora_rl.setup.settings import core_params, load_config
from dora_rl.sim.hardware import H800, ModelShape
from dora_rl.sim.presets import Preset
from dora_rl.types import UserError
from dora_rl.weights.run_models import is_run, run_config

MEAN_SHARE = 0.25  # of the token limit: the mean length, where nothing is known
SIGMA = 1.0
PROMPT_TOKENS = 128  # likewise


def preset_of_path(path: Path) -> tuple[Preset, str]:
    """The testbed, and a line that says what its lengths are."""
    if path.is_dir():
        if not is_run(path):
            raise UserError(f"{path} is a directory and no run; give a run, a file or a preset")
        config = run_config(path)
        found = [
            (one["num_tokens"], one["num_prompt"]) for one in read_lines(path / "rollouts.jsonl")
        ]
        if not found:
            raise UserError(
                f"{path} has no trained samples (rollouts.jsonl); give {path}/config.json, whose "
                "lengths are assumed"
            )
        lengths: LengthModel = Empirical(tuple(sorted(num for num, _ in found)))
        prompt = round(sum(num for _, num in found) / len(found))
        said = f"the lengths of {len(found)} trained samples"
    else:
        config = load_config(path)
        most = config.rollout.tokens_max
        lengths, prompt = (
            LogNormal.with_mean(max(1.0, MEAN_SHARE * most), SIGMA, most),
            PROMPT_TOKENS,
        )
        said = f"lengths are assumed: a mean of {MEAN_SHARE * most:.0f} tokens, up to {most}"
    preset = preset_of_config(config, path.name, lengths, prompt)
    gpus = f"{preset.num_devices} x {preset.device.name}"
    return preset, f"{path}: {preset.model.name} on {gpus}; {said} (--gpus, --set change this)"


def preset_of_config(
    config: RunConfig, name: str, lengths: LengthModel, prompt_tokens: int
) -> Preset:
    params, resources, rollout = core_params(config), config.resources, config.rollout
    path = Path(local_model(config.model.path))
    tensor = resources.devices_per_instance
    wanted = rollout.num_instances * tensor + resources.learner_ranks
    return Preset(
        name,
        H800,
        _shape(read_spec(path), path.name),
        num_devices=max(2, -(-wanted // tensor)) * tensor,
        tensor_parallel=tensor,
        batch_groups=params.batch_groups,
        group_size=params.group_size,
        updates_per_step=params.updates_per_step,
        prompt_tokens=max(1, prompt_tokens),
        lengths=lengths,
        max_staleness=params.max_staleness,
        inflight_share=params.inflight_groups / params.batch_groups,
        resident_max=rollout.versions_max or params.max_staleness + 1,
        freshness=params.freshness,
        streaming=params.streaming,
        kv_moves=params.kv_moves,
        repartition=params.repartition,
        oversample=params.oversample,
    )


def _shape(spec: ModelSpec, name: str) -> ModelShape:
    """Of a mixture the parameters that a token meets; of a dense model all of them."""
    total = float(num_params(spec))
    active = total
    if spec.moe is not None:
        idle = spec.moe.num_experts - spec.moe.top_k
        active -= 3.0 * len(spec.moe.sparse_layers) * idle * spec.hidden * spec.moe.intermediate
    width = spec.num_heads * spec.head_dim
    heads = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
    return ModelShape(name, total, active, *heads, attention_width=width)
