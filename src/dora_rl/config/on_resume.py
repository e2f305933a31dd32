"""What may change when a run is resumed: one rule for every key of the configuration.

A run that goes on has groups in flight: prompts that were drawn, responses half generated, samples
that were scored. What decides their tokens, their worth or what the learner makes of them stays as
it was; a response would be half of each otherwise, and the figures of a run would be those of two.
A test walks all keys and fails for one without a rule. Keys of tables in a list are written
`section.list[].key`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any

from dora_rl.config.running import RENAMED
from dora_rl.user_code import require


class OnResume(StrEnum):
    """When a changed value holds."""

    FREE = "at once"
    NEXT_STEP = "from a later step"
    FIXED = "no"


_FREE = {
    "model": "trust_remote_code",
    "data": "check_rows check_disjoint",
    "reward": (
        "timeout_s attempts retry_wait_s num_workers concurrent_max cache_entries_max "
        "teacher_url teacher_key_variable"
    ),
    "reward.functions[]": "label cache",
    "env": "num_workers slots_factor",
    "env.environments[]": "timeout_s concurrent_max latency_s",
    "rollout": (
        "num_instances threads block_tokens num_blocks kv_bytes_max host_blocks_max seqs_max "
        "step_tokens_max versions_max prefix_cache one_pass compiled_kernels cuda_graphs "
        "async_steps burst_max speculation vllm_kv_moves verify_weights journal_steps"
    ),
    "algorithm": "skip_zero_advantage",
    "orchestration": (
        "num_steps inflight_groups ready_max samples_min streaming kv_moves repartition "
        "level_running filter_equal filtered_max failed_share_max attempts_max oversample "
        "fill_older_max rebalance_period_s report_timeout_s load_timeout_s move_timeout_s "
        "trainer_timeout_s progress_timeout_s losses_max trainer_losses_max instance_losses_max "
        "load_failures_max freshness"
    ),
    "trainer": (
        "pack_tokens document_tokens_max streaming canonical_order device threads attention "
        "compile activation_checkpointing logits_chunk_tokens trust_remote_code "
        "skipped_updates_max"
    ),
    "weights": "root verify handover",
    "checkpoint": "every_steps state_every_s keep keep_best dtype shard_bytes_max",
    "evaluation": "every_steps failed_share_max",
    "logging": "progress sinks sink_options samples_shown",
    "audit": "recompute_share tolerance",
    "runtime": (
        "run_dir device device_memory_gb threads grace_s watchdog_s mps mps_learner_percent "
        "mps_learner_yields address bind_address tls_certificate tls_key tls_authority"
    ),
    "resources": "learner_ranks devices_per_instance elastic_instances instances_max",
}
_NEXT_STEP = {
    "orchestration": "max_staleness batch_groups",
    "algorithm": "critic_lr",
    "trainer": (
        "lr betas eps weight_decay schedule warmup_updates num_updates lr_floor_ratio "
        "grad_norm_max updates_per_step"
    ),
}
_FIXED = {
    "model": "path",
    "data": (
        "train eval seed shuffle prompt_tokens_max chat system_prompt template_options "
        "curriculum curriculum_pools curriculum_column curriculum_share_min"
    ),
    "data.train[]": (
        "path weight name split subset prompt_column answer_column answer_after options env "
        "prompt_tokens"
    ),
    "data.eval[]": (
        "path weight name split subset prompt_column answer_column answer_after options env "
        "prompt_tokens"
    ),
    "reward": "functions teacher_name",
    "reward.functions[]": "name weight form options",
    "env": "environments",
    "env.environments[]": "name label options weight turns_max",
    "rollout": (
        "backend num_samples tokens_max temperature top_k top_p min_p stop_ids stop_strings "
        "ignore_eos raw_logprobs forced_length_median forced_length_sigma dtype context_max"
    ),
    "algorithm": (
        "loss advantage branch_reward aggregation constant_tokens clip_low clip_high dual_clip "
        "old_logprobs corrections correction_numerator token_ratio_max token_ratio_min "
        "sequence_ratio_max sequence_ratio_min geometric_ratio_max geometric_ratio_min "
        "behaviour_ratio_max kl_coef "
        "kl_estimator kl_in kl_ratio_weighted entropy_coef temperature overlong_tokens_max "
        "overlong_buffer_tokens overlong_penalty gamma gae_lambda whiten_advantages value_coef "
        "value_clip reference loss_args advantage_args "
        "distill_coef distill_in distill_top_k distill_clip"
    ),
    "orchestration": "mode",
    "trainer": (
        "compute_dtype publish_dtype implementation lora_rank lora_alpha lora_dropout "
        "lora_targets lora_publish reference_model teacher_model router_replay router_aux_coef seed"
    ),
    "checkpoint": "best_metric best_is_max",
    "evaluation": "num_prompts num_samples success_min",
    "logging": "rollouts",
    "runtime": "world seed",
    "resources": "storage_shards",
}


_SECTIONS = {OnResume.FREE: _FREE, OnResume.NEXT_STEP: _NEXT_STEP, OnResume.FIXED: _FIXED}
RULES = {
    f"{section}.{name}": rule
    for rule, sections in _SECTIONS.items()
    for section, names in sections.items()
    for name in names.split()
}
assert len(RULES) == sum(
    len(names.split()) for sections in _SECTIONS.values() for names in sections.values()
), "a key has two rules"
# Its rows are compared, not its paths alone: see `controller.run_dir.check_same_data`.
FINGERPRINTED = "data.train"


def check_changes(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse a changed key that is fixed. Both are whole configurations, as JSON has them."""
    # The run may have begun when a key still had its old name.
    before = {RENAMED.get(key, key): value for key, value in _flat(old).items()}
    now = _flat(new)
    for key in before | now:
        # A key that the run's release did not know is as it was where it says nothing now.
        new_key = key not in before and not now[key]
        same = key.startswith(FINGERPRINTED) or new_key or before.get(key) == now.get(key)
        require(
            (
                same or RULES.get(_plain(key)) is not OnResume.FIXED,
                f"{key} was {_shown(before, key)} and cannot become {_shown(now, key)} in a "
                "resumed run: what is in flight would be half of each; start a new run "
                "(runtime.run_dir=DIRECTORY)",
            )
        )


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Sections and tables in lists opened up: `reward.functions[0].name`."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if any(rule.startswith(f"{_plain(key)}[].") for rule in RULES):
            for place, entry in enumerate(value):
                found |= _flat(entry, f"{key}[{place}].")
        elif isinstance(value, dict) and _plain(key) not in RULES:
            found |= _flat(value, f"{key}.")
        else:
            found[key] = value
    return found


def _plain(key: str) -> str:
    """Without the places in lists."""
    return re.sub(r"\[\d+\]", "[]", key)


def _shown(data: dict[str, Any], key: str) -> str:
    return repr(data[key]) if key in data else "absent"
