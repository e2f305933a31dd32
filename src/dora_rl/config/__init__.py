"""The configuration: parsed once, checked across fields, frozen, written out next to the run.

Each section of the TOML file is one class. Unknown keys are errors that name the nearest key.
Nothing here imports torch or performs work. Units stand last in a name (`timeout_s`), limits end
in `_max`, counts begin with `num_`.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from dora_rl.config.env import EnvConfig
from dora_rl.config.section import Section
from dora_rl.types import Mode, SamplingParams, UserError

Beta = Annotated[float, Field(ge=0, lt=1)]
TokenId = Annotated[int, Field(ge=0)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
FINITE = ConfigDict(allow_inf_nan=False)


class ModelConfig(Section):
    """[model] what is trained: a directory in Hugging Face's form."""

    # A directory with config.json, safetensors and a tokenizer; `hf download ID --local-dir DIR`
    # makes one.
    path: str = Field(min_length=1)
    trust_remote_code: bool = False  # run Python code that comes with the model


class OrchestrationConfig(Section):
    """[orchestration] which paradigm, how stale, how much in flight.

    Zero means "derive it": groups in flight from the batch, samples needed from the group.
    """

    mode: Mode = Mode.MULTI_VERSION  # the paradigm; see concepts.md
    # K: the oldest version a step may train is its own - K.
    max_staleness: int = Field(default=2, ge=0)
    num_steps: int = Field(default=100, ge=1)  # training steps of the whole run
    batch_groups: int = Field(default=32, ge=1)  # prompts per training step
    inflight_groups: int = Field(default=0, ge=0)  # target for groups in flight; 0: 1.5 batches
    ready_max: int = Field(default=0, ge=0)  # ready groups that stop new ones; 0: K batches
    # A group trains with the samples that were scored if there are at least so many; what failed
    # is left out, and the advantages are those of the rest. 0: half of the group, and at least
    # two. With `rollout.num_samples` here a single failed sample costs its whole group.
    samples_min: int = Field(default=0, ge=0)
    streaming: bool = True  # train on groups while the rest of the batch still generates
    kv_moves: bool = True  # a running request moves with its KV cache; off: it is prefilled again
    repartition: bool = True  # instances change version with the load; off: only when they must
    level_running: bool = False  # also level the running requests of a version over its instances
    filter_equal: bool = False  # leave out groups whose rewards are all equal
    filtered_max: int = Field(default=1000, ge=1)  # filtered groups in a row that stop the run
    # The run stops, and can be resumed, when more than this share of its prompts have failed.
    failed_share_max: float = Field(default=0.5, ge=0, le=1)
    # A sample counts as failed after so many starts, or scores, without progress; a prompt is set
    # aside after so many failed groups, or losses of an instance that it had to itself.
    attempts_max: int = Field(default=4, ge=1)
    # A request that ran on so many lost instances in a row, and gained no token in between, is
    # tried alone from then on, until it is clear whether it is what kills them.
    losses_max: int = Field(default=2, ge=1)
    # The run stops, and can be resumed, when the learner was lost so often in one and the same
    # step. 0: never.
    trainer_losses_max: int = Field(default=3, ge=0)
    # The run stops, and can be resumed, when so many instances were lost in a row before any
    # request had gained a token. 0: never.
    instance_losses_max: int = Field(default=30, ge=0)
    # The run stops, and can be resumed, when a version was refused so often (its checksum or its
    # canary is wrong, say) and no instance holds it. 0: never.
    load_failures_max: int = Field(default=12, ge=0)
    oversample: float = Field(default=1.25, ge=1)  # replication: groups issued over groups needed
    fill_older_max: int = Field(default=0, ge=0)  # per step, on idle slots of older versions
    rebalance_period_s: float = Field(default=30.0, gt=0)  # between two looks at the partition
    report_timeout_s: float = Field(default=60.0, gt=0)  # for an instance to report
    # For an instance that reports requests at work to gain a token, and for each of these. Then
    # the instance is replaced, or the request started again. Turns of environments do not count.
    progress_timeout_s: float = Field(default=300.0, gt=0)
    load_timeout_s: float = Field(default=300.0, gt=0)  # for a version to load, a worker to start
    move_timeout_s: float = Field(default=60.0, gt=0)  # for a request to arrive elsewhere
    trainer_timeout_s: float = Field(default=1800.0, gt=0)  # for the learner to progress


class RewardFunction(Section):
    """One entry of `reward.functions`. A plain string stands for its `name`."""

    # `path/to/file.py:name`, `package.module:name`, or a built-in: exact, regex, math, format,
    # length, code, judge, model.
    name: str = Field(min_length=1)
    weight: float = Field(default=1.0, allow_inf_nan=False)  # in the sum
    label: str = ""  # in the metrics; empty: the name
    # Of the signature; auto: from its parameters.
    form: Literal["auto", "trl", "verl", "verifiers", "plain"] = "auto"
    # Arguments of a built-in, or keyword arguments of a function.
    options: dict[str, Any] = Field(default_factory=dict)
    # Remember scores of equal samples. None: only where a score is dear (code, judge, model).
    cache: bool | None = None


class RewardConfig(Section):
    """[reward] what responses are worth: the weighted sum of `functions`."""

    functions: tuple[RewardFunction, ...] = ()  # names, or tables with a name; see below
    timeout_s: float = Field(default=30.0, gt=0)  # of one call of one function
    # Tries of a call that raises or times out. 0: three for asynchronous functions and the judge,
    # otherwise one.
    attempts: int = Field(default=0, ge=0)
    retry_wait_s: float = Field(default=0.5, ge=0)  # before the second try; grows with each
    num_workers: int = Field(default=1, ge=1)  # processes that score
    concurrent_max: int = Field(default=16, ge=1)  # asynchronous calls at once, in one worker
    cache_entries_max: int = Field(default=65536, ge=0)  # per function and worker; 0: no cache

    @property
    def worker_timeout_s(self) -> float:
        """All tries of all functions: a worker that takes longer over one sample hangs."""
        tries = self.attempts or 3
        one_s = tries * (self.timeout_s + self.retry_wait_s * tries)
        return max(1, len(self.functions)) * one_s + 10.0

    @field_validator("functions", mode="before")
    @classmethod
    def _strings_are_names(cls, value: object) -> object:
        entries = value if isinstance(value, (list, tuple)) else (value,)
        return tuple({"name": entry} if isinstance(entry, str) else entry for entry in entries)


class RolloutConfig(Section):
    """[rollout] the generation engine and how it samples.

    Zero means "derive it": the KV pool from memory, the context from the model, the resident
    versions from `max_staleness`.
    """

    model_config = FINITE

    backend: Literal["native", "vllm"] = "native"  # native: our engine; vllm: vLLM instances
    num_instances: int = Field(default=1, ge=1)  # engines, each a process of its own
    threads: int = Field(default=1, ge=1)  # of each instance, on the CPU
    num_samples: int = Field(default=8, ge=1)  # responses per prompt: the size of a group
    # -- sampling
    tokens_max: int = Field(default=256, ge=1)  # of one response (of one turn, in an environment)
    temperature: float = Field(default=1.0, ge=0.0)  # above 0 to train; 0: greedy
    # 0: off. For `dora-rl eval`: a run that trains refuses to truncate, see algorithms.md.
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)  # 1: off; likewise
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)  # 0: off; likewise
    stop_ids: tuple[TokenId, ...] = ()  # token ids that end a response, beside the model's own
    stop_strings: tuple[str, ...] = ()  # texts that end a response
    ignore_eos: bool = False  # go on past the end-of-sequence token
    raw_logprobs: bool = False  # also record log-probs at temperature 1, without filters
    # For comparisons of speed: responses are cut off (and kept going) at a log-normal length that
    # depends on (seed, prompt, sample) alone, the same in every mode. A median of 0: no forcing.
    forced_length_median: float = Field(default=0.0, ge=0.0)
    # Of its logarithm: the spread of the forced lengths.
    forced_length_sigma: float = Field(default=1.0, gt=0.0)
    # -- engine
    # None: that of trainer.compute_dtype; where it is auto, float32 on a CPU, else bfloat16.
    dtype: Literal["float32", "bfloat16"] | None = None
    block_tokens: int = 64  # of one KV block: a power of two, 16 or more
    num_blocks: int = Field(default=0, ge=0)  # of the KV cache; 0: from kv_bytes_max
    # 0: what the memory plan of the GPU leaves (`dora-rl check` prints it), 1 GiB on a CPU. On a
    # cluster 85 % of the free memory.
    kv_bytes_max: int = Field(default=0, ge=0)
    host_blocks_max: int = Field(default=4096, ge=0)  # blocks of spilled and parked requests
    seqs_max: int = Field(default=256, ge=1)  # requests an instance decodes at once
    # Rows of one step: decoding and chunks of prefill.
    step_tokens_max: int = Field(default=2048, ge=1)
    context_max: int = Field(default=0, ge=0)  # 0: the model's own, at most 32,768
    # Resident on one instance. 0: max_staleness + 1, or fewer where a GPU's memory is short.
    versions_max: int = Field(default=0, ge=0)
    prefix_cache: bool = True  # share the blocks of equal prompts
    one_pass: bool = True  # all versions in one pass; off: one pass each
    compiled_kernels: bool = True  # on a CPU: compiled at first use, if there is a C compiler
    cuda_graphs: bool = True  # replay a decode step as one launch
    async_steps: bool = True  # on a GPU: launch a step before the last one is read
    # On a GPU: decode steps launched at once where the host is the slower one.
    burst_max: int = Field(default=8, ge=1)
    # vLLM: a request that moves takes its KV along; otherwise it is prefilled again.
    vllm_kv_moves: bool = False
    verify_weights: bool = True  # check the checksum and the canary of every version loaded
    journal_steps: int = Field(default=16, ge=1)  # steps between two writes of the token journal

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            tokens_max=self.tokens_max,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop_ids=self.stop_ids,
            stop_strings=self.stop_strings,
            ignore_eos=self.ignore_eos,
            raw_logprobs=self.raw_logprobs,
        )


class AlgorithmConfig(Section):
    """[algorithm] the loss, its corrections and the advantages."""

    model_config = FINITE

    loss: str = "grpo"  # a recipe, or path/to/file.py:function
    advantage: str | None = None  # group | group_mean | leave_one_out | batch | gae | file.py:name
    aggregation: str | None = None  # token_mean | sequence_mean | constant
    constant_tokens: int | None = Field(
        default=None, ge=1
    )  # denominator per sequence of `constant`
    clip_low: float | None = Field(default=None, ge=0, le=1)  # epsilon below; none: the recipe's
    clip_high: float | None = Field(default=None, ge=0)  # epsilon above; none: the recipe's
    # Cap on the ratio where the advantage is negative, above 1. None: the recipe's; 0: no cap.
    dual_clip: float | None = Field(default=None, ge=0)
    old_logprobs: str | None = None  # rollout | behaviour | proximal
    corrections: tuple[str, ...] | None = None  # names, see algorithms.md; empty for none
    correction_numerator: Literal["old", "current"] = "old"  # policy over the rollout's
    token_ratio_max: float = Field(default=2.0, ge=1)  # bounds of token_tis, token_mis, token_mask
    token_ratio_min: float = Field(default=0.5, ge=0, le=1)  # of token_mask
    # Of sequence_tis, sequence_mis, sequence_mask.
    sequence_ratio_max: float = Field(default=2.0, ge=1)
    sequence_ratio_min: float = Field(default=0.5, ge=0, le=1)  # of sequence_mask
    geometric_ratio_max: float = Field(default=1.001, ge=1)  # of geometric_mask and hierarchical
    geometric_ratio_min: float = Field(default=0.999, ge=0, le=1)  # of the same
    # Cap on proximal / behaviour in decoupled PPO, 1 or more. None: the recipe's, 5; 0: no cap.
    behaviour_ratio_max: float | None = Field(default=None, ge=0)
    # Hold the reference even where kl_coef is 0: the KL is measured, and a loss of your own sees
    # the reference's log-probs.
    reference: bool = False
    kl_coef: float = Field(default=0.0, ge=0)  # of the KL to the reference
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # see algorithms.md
    kl_in: Literal["loss", "reward"] = "loss"  # where it counts
    kl_ratio_weighted: bool = False  # KL times the ratio: an unbiased gradient off-policy
    entropy_coef: float = 0.0  # of the entropy bonus; below 0 a penalty
    temperature: float = Field(default=0.0, ge=0)  # of the log-probs; 0: the rollout's
    skip_zero_advantage: bool = True  # no forward pass where nothing can be learned
    overlong_tokens_max: int = Field(default=0, ge=0)  # 0: no overlong shaping
    overlong_buffer_tokens: int = Field(default=0, ge=0)  # where the penalty grows from 0
    overlong_penalty: float = Field(default=1.0, ge=0)  # at overlong_tokens_max
    gamma: float = Field(default=1.0, ge=0, le=1)  # discount of GAE
    gae_lambda: float = Field(default=1.0, ge=0, le=1)  # of GAE
    whiten_advantages: bool = True  # of GAE, over the whole batch
    value_coef: float = Field(default=0.5, ge=0)  # of the critic's loss
    # How far a value may move from its old one; 0: anywhere.
    value_clip: float | None = Field(default=0.2, ge=0)
    critic_lr: float = Field(default=1e-5, ge=0)  # the critic's own
    # Arguments of a loss of your own, by name; see extending.md.
    loss_args: dict[str, bool | int | float | str] = Field(default_factory=dict)
    # Arguments of an advantage of your own, by name.
    advantage_args: dict[str, bool | int | float | str] = Field(default_factory=dict)

    @field_validator("loss_args", "advantage_args", mode="before")
    @classmethod
    def _arguments_are_scalars(cls, value: object, info: ValidationInfo) -> object:
        for word, given in value.items() if isinstance(value, dict) else ():
            fits = isinstance(given, (bool, int, float, str))
            if not fits or (isinstance(given, float) and not isfinite(given)):
                raise UserError(
                    f"algorithm.{info.field_name}.{word} = {given}: must be a finite number, "
                    "a string, true or false"
                )
        return value


class TrainerConfig(Section):
    """[trainer] optimizer, packing, precision, sharding."""

    model_config = FINITE

    lr: float = Field(default=1e-6, ge=0)  # learning rate of AdamW
    betas: tuple[Beta, Beta] = (0.9, 0.999)  # of AdamW
    eps: float = Field(default=1e-8, gt=0)  # of AdamW
    weight_decay: float = Field(default=0.0, ge=0)  # of AdamW
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after the warm-up
    warmup_updates: int = Field(default=0, ge=0)  # of linear growth from 0
    num_updates: int = Field(default=0, ge=0)  # horizon of linear and cosine; 0 with constant
    lr_floor_ratio: float = Field(default=0.0, ge=0, le=1)  # where linear and cosine end
    grad_norm_max: float = Field(default=1.0, ge=0)  # 0: no clipping
    updates_per_step: int = Field(default=1, ge=1)  # U: update i takes the i-th B/U groups
    # An update whose loss or gradient is not finite is skipped. So many in a row stop the run.
    skipped_updates_max: int = Field(default=10, ge=1)
    # Of one micro-batch. 0: 4096 on a CPU, from the memory plan on a GPU, 32768 at most.
    pack_tokens: int = Field(default=0, ge=0)
    document_tokens_max: int = Field(default=0, ge=0)  # 0: what the model's positions allow
    streaming: bool = True  # compute on groups as they come; off: at the end of a step
    canonical_order: bool = False  # a step does not depend on the order of arrival
    compute_dtype: Dtype = "auto"  # auto: float32 on a CPU, bfloat16 on CUDA
    publish_dtype: Dtype = "auto"  # auto: the compute dtype
    device: str = "auto"  # auto: cuda where there is one, else cpu
    threads: int = Field(default=0, ge=0)  # 0: leave torch's setting alone
    # Of the packed decoder; auto: the fastest here.
    attention: Literal["auto", "varlen", "flex", "blocks", "sdpa", "loop"] = "auto"
    # lean: our packed decoder; auto: that where it knows the family.
    implementation: Literal["auto", "lean", "transformers"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"  # its layers; auto: on CUDA
    # layer: the activations of each layer are computed again in the backward pass, which saves most
    # of their memory and costs a fifth of the speed. auto: only where a GPU's memory is short.
    activation_checkpointing: Literal["auto", "none", "layer"] = "auto"
    # Whose logits exist at once. 0: chosen from the vocabulary and the memory.
    logits_chunk_tokens: int = Field(default=0, ge=0)
    lora_rank: int = Field(default=0, ge=0)  # 0: all parameters are trained
    lora_alpha: float = Field(default=16.0, gt=0)  # scale is alpha / rank
    # Acts on the adapters' input in training passes; canary, scores and versions have none.
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    # Names of linear layers of the blocks; empty means all. The output matrix takes no adapter.
    lora_targets: tuple[str, ...] = ()
    # A version is its adapter, or whole weights with the adapter merged. The learner computes with
    # what it publishes: beside the base, or with the merged weights rounded as published.
    lora_publish: Literal["adapters", "merged"] = "adapters"
    trust_remote_code: bool = False  # for models that run through transformers
    reference_model: str = ""  # empty: the starting weights
    seed: int = 0  # of new adapters


class CheckpointConfig(Section):
    """[checkpoint] how often, how many, which is best."""

    every_steps: int = Field(default=10, ge=0)  # between two checkpoints; 0: none
    # The optimizer's moments are written beside training this often, so that a learner that dies
    # loses at most so much of them. Its weights and its schedule are exact in any case. 0: after
    # every step.
    state_every_s: float = Field(default=60.0, ge=0)
    keep: int = Field(default=2, ge=0)  # newest ones; 0 keeps all
    # Keep the best version that was evaluated: its sealed weights, and its checkpoint where it has
    # one. It goes when a better one was found. `export --step best` gives it.
    keep_best: bool = True
    best_metric: str = "eval/greedy"  # what best means; a metric of the evaluation
    best_is_max: bool = True  # off: the smallest is best
    dtype: Dtype = "auto"  # of the model files; the float32 masters are always beside them
    shard_bytes_max: int = 4 << 30  # of one safetensors file


class DataSource(Section):
    """One entry of `data.train` or `data.eval`. A plain string stands for its `path`."""

    # A .jsonl, .json or .parquet file, a directory of those, a directory that `datasets` saved, a
    # Hugging Face id, or code that makes rows: `package.module:name` or `path/to/file.py:name`.
    path: str = Field(min_length=1)
    weight: float = Field(default=1.0, gt=0)  # share of the prompts, relative to the other sources
    name: str = ""  # in the metrics; empty: the path
    split: str = ""  # of a Hugging Face dataset
    subset: str = ""  # of a Hugging Face dataset
    prompt_column: str = "prompt"  # a string or a list of messages
    # Empty: the first of answer, ground_truth, solution, label, reward_model.ground_truth.
    answer_column: str = ""
    # The answer is what follows the last such mark in its column, with commas taken out of numbers:
    # "####" for GSM8K. Empty: the whole column.
    answer_after: str = ""
    # Arguments of a source that is code.
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    env: str = ""  # label of its environment; empty: the only one
    # `first`: the first token of the prompt alone; an agent with its own prompt writes the rest.
    prompt_tokens: Literal["all", "first"] = "all"


class DataConfig(Section):
    """[data] where prompts come from."""

    train: tuple[DataSource, ...] = ()  # paths, or tables with a path; see below
    eval: tuple[DataSource, ...] = ()  # held-out prompts, in the same form
    seed: int = 0  # of the order
    shuffle: bool = True  # off: in the order of the files
    # Longer prompts are left out and counted. 0: no limit.
    prompt_tokens_max: int = Field(default=1024, ge=0)
    # `auto`: message lists go through the chat template, strings stay as they are.
    # `always`: a string becomes a user message. `never`: message lists are an error.
    chat: Literal["auto", "always", "never"] = "auto"
    system_prompt: str = ""  # put before every conversation
    # Arguments of the chat template.
    template_options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    # Rows of an endless source that are looked at before the run starts.
    check_rows: int = Field(default=256, ge=1)
    # Refuse to start when an evaluation prompt is also a training prompt.
    check_disjoint: bool = True

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _strings_are_paths(cls, value: object) -> object:
        entries = value if isinstance(value, (list, tuple)) else (value,)
        return tuple({"path": entry} if isinstance(entry, str) else entry for entry in entries)


class WeightsConfig(Section):
    """[weights] the store of sealed versions."""

    # Where live versions lie. Empty: a directory of the run's own in /dev/shm.
    root: str = ""
    # Hash a version's bytes before its first use in each process.
    verify: bool = True


class EvaluationConfig(Section):
    """[evaluation] held-out prompts, generated under one pinned version while training goes on."""

    every_steps: int = Field(default=0, ge=0)  # 0: only before the first and after the last step
    num_prompts: int = Field(default=200, ge=1)  # of the held-out data
    num_samples: int = Field(default=1, ge=1)  # sampled responses per prompt, for pass@k
    # A response passes, for pass@k, if its reward is at least this.
    success_min: float = Field(default=1.0, allow_inf_nan=False)
    # Scores are over the answers that could be scored, with the number of the others beside them.
    # Where a larger share than this failed, the evaluation has no score and is shown as failed.
    failed_share_max: float = Field(default=0.1, ge=0, le=1)


class LoggingConfig(Section):
    """[logging] what is written beside metrics.jsonl and the event log."""

    rollouts: bool = True  # every trained sample as a line of rollouts.jsonl
    progress: bool = True  # live lines on the console
    # Metrics also go here, where installed: `tensorboard`, `wandb`, `mlflow`, `trackio`, or
    # `path/to/file.py:Name` for a writer of your own, see extending.md.
    sinks: tuple[str, ...] = ()


class AuditConfig(Section):
    """[audit] what a run checks about itself while it goes on; see audit.md."""

    # This share of the trained samples is computed again by the learner, from the sealed weights
    # of the version that the log names, while it waits for work. The log has the outcome, and
    # `dora-rl audit` counts a difference beyond the tolerance as a finding. Not done with several
    # learner ranks, and not where top_k, top_p or min_p are set.
    recompute_share: float = Field(default=0.01, ge=0, le=1)
    # How far the log-probs of engine and learner may lie apart, per token on average. 0 means
    # 0.0001 where both compute in float32, and 0.05 otherwise.
    tolerance: float = Field(default=0.0, ge=0)


class RuntimeConfig(Section):
    """[runtime] where the workers run."""

    # local: a process for each worker, on this machine. inline: all of them in one process, for a
    # debugger in a reward or a loss. ray: a Ray cluster.
    kind: Literal["local", "inline", "ray"] = "local"
    run_dir: str = "runs/latest"  # everything of the run is written here
    seed: int = 0  # of sampling: with the prompt and sample number it fixes the draws
    device: str = "auto"  # auto: cuda where there is one, else cpu
    # Use so much of each GPU and no more, in units of 1,000,000,000 bytes: as on a smaller card, or
    # beside other programs. 0: all that is free.
    device_memory_gb: float = Field(default=0.0, ge=0)
    threads: int = Field(default=0, ge=0)  # of every worker; 0: each section's own
    grace_s: float = Field(default=30.0, gt=0)  # to end cleanly after a signal
    watchdog_s: float = Field(default=60.0, gt=0)  # without progress, until the waits are named
    # Kernels of instances and learner side by side on one shared GPU (NVIDIA's MPS). A fault on
    # the device in one process then ends them all; the run goes on from its journals.
    mps: bool = False
    # Under MPS, where instances decode while the learner trains: how much of the GPU's processors
    # the learner may use, in percent. The longest responses hold up a run, not the learner.
    mps_learner_percent: int = Field(default=100, ge=10, le=100)
    # Likewise: kernels of the instances go first where both wait for a processor.
    mps_learner_yields: bool = False
    address: str = ""  # of a cluster


class ResourcesConfig(Section):
    """[resources] devices of a cluster: how many for each role."""

    learner_ranks: int = Field(default=1, ge=1)  # processes that share the learner (FSDP2)
    # GPUs of one instance. More than one: vLLM's tensor parallelism (the native engine has one).
    devices_per_instance: int = Field(default=1, ge=1)
    # So many of the instances sit on the learner's devices and sleep while it computes.
    elastic_instances: int = Field(default=0, ge=0)
    # Up to so many instances where hosts with room join a running cluster. 0: as many as asked for.
    instances_max: int = Field(default=0, ge=0)
    # Processes on the controller's host that keep the samples of a cluster run.
    storage_shards: int = Field(default=1, ge=1)


class RunConfig(Section):
    """One run: every section, resolved."""

    model: ModelConfig
    data: DataConfig = Field(default_factory=DataConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    orchestration: OrchestrationConfig = Field(default_factory=OrchestrationConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    audit: AuditConfig = Field(default_factory=AuditConfig)
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig)
    resources: ResourcesConfig = Field(default_factory=ResourcesConfig)

    def engine_dtype(self, device: str) -> Literal["float32", "bfloat16"]:
        """What instances and evaluator on `device` compute in: as the learner, if nothing is said.
        They then differ by rounding alone, and a canary proves what it can."""
        if self.rollout.dtype is not None:
            return self.rollout.dtype
        if self.trainer.compute_dtype in ("float32", "bfloat16"):
            return self.trainer.compute_dtype
        return "float32" if device == "cpu" else "bfloat16"

    def engine_options(self, device: str, versions_max: int) -> dict[str, Any]:
        """Arguments of `engine.options.EngineOptions` for one instance on `device`."""
        names = (
            "block_tokens num_blocks kv_bytes_max host_blocks_max seqs_max context_max "
            "prefix_cache one_pass compiled_kernels cuda_graphs async_steps burst_max"
        )
        rollout = self.rollout
        return {name: getattr(rollout, name) for name in names.split()} | {
            "device": device,
            "dtype": self.engine_dtype(device),
            "step_tokens_max": max(rollout.step_tokens_max, rollout.seqs_max),
            "versions_max": rollout.versions_max or versions_max,
        }
