"""The configuration: parsed once, checked across fields, frozen, written out next to the run.

Each section of the TOML file is one class; those of how a run runs are in `running`, those of what
is trained, and on what, here. Unknown keys are errors that name the
nearest key. Nothing here imports torch or performs work. Units stand last in a name (`timeout_s`),
limits end in `_max`, counts begin with `num_`.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from dora_rl.config.running import (
    AuditConfig,
    CheckpointConfig,
    Dtype,
    EvaluationConfig,
    LoggingConfig,
    OrchestrationConfig,
    ResourcesConfig,
    RuntimeConfig,
    WeightsConfig,
)
from dora_rl.config.section import STRINGS_ARE_NAMES, STRINGS_ARE_PATHS, Section
from dora_rl.types import SamplingParams
from dora_rl.user_code import require

Beta = Annotated[float, Field(ge=0, lt=1)]
TokenId = Annotated[int, Field(ge=0)]
FINITE = ConfigDict(allow_inf_nan=False)


class ModelConfig(Section):
    """[model] what is trained: a directory in Hugging Face's form."""

    path: str = Field(min_length=1)
    """The directory of the model, with config.json, safetensors and a tokenizer.
    `hf download ID --local-dir DIR` makes one. An id of the Hugging Face hub is downloaded before
    the start, where the network allows."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model may run, in tokenizer and learner."""


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
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
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
    curriculum: Literal["off", "pools", "rows"] = "off"
    """Whether prompts come less often while their groups tell nothing: all samples right, or all
    wrong. Of each of the `pools` that the sources are divided into, or of each of the `rows`, the
    share of recent groups whose rewards differed decides how often it comes; see algorithms.md."""
    curriculum_pools: int = Field(default=8, ge=1)
    """Under `pools`: into how many pools of the same size each source is divided, from its easiest
    rows to its hardest. With 1 every source is a pool. Under `rows` it is the number of rows, which
    the run fills in."""
    curriculum_column: str = Field(default="difficulty", min_length=1)
    """Under `pools`: the column by which rows are ordered, a number."""
    curriculum_share_min: float = Field(default=0.1, gt=0, le=1)
    """How often prompts come whose groups tell nothing, relative to those whose groups always tell
    something."""


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
    teacher_url: str = ""
    """The base of an OpenAI-compatible API, such as `http://localhost:8000/v1`, whose model is the
    teacher: the workers ask it for the log-probs of every sample (see algorithms.md). If empty,
    none is asked."""
    teacher_name: str = ""
    """The name of that model at its endpoint."""
    teacher_key_variable: str = "OPENAI_API_KEY"
    """The environment variable that holds the key for the teacher's endpoint, if it has one."""

    @property
    def worker_timeout_s(self) -> float:
        """All tries of all functions: a worker that takes longer over one sample hangs."""
        tries = self.attempts or 3
        one_s = tries * (self.timeout_s + self.retry_wait_s * tries)
        return max(1, len(self.functions) + bool(self.teacher_url)) * one_s + 10.0


class EnvironmentEntry(Section):
    """One entry of `env.environments`. A plain string stands for its `name`."""

    name: str = Field(min_length=1)
    """The environment: one of the built-in ones (agent, calculator, guess, single_turn),
    `package.module:Name` or `path/to/file.py:Name`; or one of another package: `verifiers:NAME`,
    `reasoning_gym:DATASET`, `textarena:ID`, `openenv:URL`."""
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


class RolloutConfig(Section):
    """[rollout] the generation engine and how it samples.

    Zero means "derive it": the KV pool from memory, the context from the model, the resident
    versions from `max_staleness`.
    """

    model_config = FINITE

    backend: Literal["native", "vllm"] = "native"
    """Who generates: `native` is the engine of this package, `vllm` runs vLLM instances."""
    num_instances: int = Field(default=1, ge=1)
    """The number of rollout engines; each is a process of its own."""
    threads: int = Field(default=1, ge=1)
    """The number of CPU threads of each instance."""
    num_samples: int = Field(default=8, ge=1)
    """G: the number of responses to each prompt, which form a group."""

    # How tokens are drawn.
    tokens_max: int = Field(default=256, ge=1)
    """The most tokens of one response; in an environment, of one turn."""
    temperature: float = Field(default=1.0, ge=0.0)
    """The temperature of sampling. 0 is greedy; training needs more than 0."""
    top_k: int = Field(default=0, ge=0)
    """Sampling is from the k likeliest tokens; 0 switches this off. It is for `dora-rl eval`: a run
    that trains refuses to truncate, see algorithms.md."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sampling is from the likeliest tokens that together have this probability; 1 switches this
    off. For `dora-rl eval` only, as top_k."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Sampling is from tokens that have at least this share of the likeliest one's probability; 0
    switches this off. For `dora-rl eval` only, as top_k."""
    stop_ids: tuple[TokenId, ...] = ()
    """Token ids that end a response, beside the model's own."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response."""
    ignore_eos: bool = False
    """Whether a response goes on past the end-of-sequence token."""
    raw_logprobs: bool = False
    """Whether log-probs at temperature 1 and without filters are recorded too."""
    forced_length_median: float = Field(default=0.0, ge=0.0)
    """For comparisons of speed: responses are cut off (and kept going) at a log-normal length with
    this median, in tokens. It depends on seed, prompt and sample alone, so it is the same in every
    mode. 0 means no forcing."""
    forced_length_sigma: float = Field(default=1.0, gt=0.0)
    """The spread of the forced lengths: the standard deviation of their logarithm."""

    # The engine.
    dtype: Literal["float32", "bfloat16"] | None = None
    """The number format that instances compute in. If not set, it is that of trainer.compute_dtype;
    where that is auto, float32 on a CPU and bfloat16 on a GPU."""
    block_tokens: int = 64
    """The number of tokens in one block of the KV cache: a power of two, 16 or more."""
    num_blocks: int = Field(default=0, ge=0)
    """The number of blocks of an instance's KV cache. 0 means as many as `kv_bytes_max` allows."""
    kv_bytes_max: int = Field(default=0, ge=0)
    """The size of an instance's KV cache in bytes. 0 means what the memory plan of the GPU leaves
    (`dora-rl check` prints it), 1 GiB on a CPU, and on a cluster 85 % of the free memory."""
    host_blocks_max: int = Field(default=4096, ge=0)
    """How many blocks of spilled and parked requests an instance may keep in host memory."""
    seqs_max: int = Field(default=256, ge=1)
    """How many requests an instance decodes at once."""
    step_tokens_max: int = Field(default=2048, ge=1)
    """How many rows one step of the engine computes at most: decoded tokens and chunks of
    prefill."""
    context_max: int = Field(default=0, ge=0)
    """The longest prompt and response together, in tokens. 0 means the model's own limit, and at
    most 32,768."""
    versions_max: int = Field(default=0, ge=0)
    """How many versions of the weights an instance holds at once. 0 means max_staleness + 1, or
    fewer where a GPU's memory is short."""
    prefix_cache: bool = True
    """Whether equal prompts share the blocks of their KV cache."""
    one_pass: bool = True
    """Whether one pass computes all resident versions. If off, each has a pass of its own."""
    compiled_kernels: bool = True
    """Whether the CPU kernels are compiled at first use, where there is a C compiler."""
    cuda_graphs: bool = True
    """Whether a decode step is replayed as one launch of a CUDA graph."""
    async_steps: bool = True
    """Whether, on a GPU, a step is launched before the results of the last one are read."""
    burst_max: int = Field(default=8, ge=1)
    """How many decode steps are launched at once on a GPU where the host is the slower one."""
    speculation: Literal["auto", "off", "on"] = "auto"
    """Whether a decode step also computes guesses of a request's next tokens, taken from the other
    responses to its prompt. A guess counts only where it is what the request draws, so responses
    are the same. `auto` does so where it measures that it pays, on a CPU in float32; on a GPU, in
    bfloat16 and with vLLM it means off. `on` always guesses on a CPU, for tests and measurements;
    runs on a GPU refuse it as yet."""
    vllm_kv_moves: bool = False
    """Whether, with vLLM, a request that moves takes its KV cache along. If off, it is prefilled
    again."""
    verify_weights: bool = True
    """Whether the checksum and the canary of every loaded version are checked."""
    journal_steps: int = Field(default=16, ge=1)
    """The number of decode steps between two writes of the token journal, from which lost requests
    go on."""

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

    loss: str = "grpo"
    """The objective: a recipe by name (see algorithms.md), or `path/to/file.py:function`."""
    advantage: str | None = None
    """How advantages are computed: group, group_mean, leave_one_out, turn, batch, gae, none (for
    distillation alone) or `file.py:name`. If not set, as the recipe says."""
    branch_reward: Literal["all", "last", "turn"] | None = None
    """Which rows of an episode with branches get its advantage: all of them, the last one alone, or
    each its share of the turns (see agents.md). If not set, all."""
    aggregation: str | None = None
    """How losses of tokens become one: token_mean, sequence_mean or constant. If not set, as the
    recipe says."""
    constant_tokens: int | None = Field(default=None, ge=1)
    """The denominator of each sequence with the aggregation `constant`, in tokens."""
    clip_low: float | None = Field(default=None, ge=0, le=1)
    """The ratio is clipped below at 1 minus this. If not set, as the recipe says."""
    clip_high: float | None = Field(default=None, ge=0)
    """The ratio is clipped above at 1 plus this. If not set, as the recipe says."""
    dual_clip: float | None = Field(default=None, ge=0)
    """A cap, above 1, on the ratio where the advantage is negative. If not set, as the recipe says;
    0 means no cap."""
    old_logprobs: str | None = None
    """What ratios are taken to: rollout, behaviour or proximal (see algorithms.md). If not set, as
    the recipe says."""
    corrections: tuple[str, ...] | None = None
    """The corrections for data of older versions, by name (see algorithms.md). If not set, as the
    recipe says; an empty list means none."""
    correction_numerator: Literal["old", "current"] = "old"
    """The policy whose probability a correction divides by that of the rollout."""
    token_ratio_max: float = Field(default=2.0, ge=1)
    """The upper bound of the corrections token_tis, token_mis and token_mask."""
    token_ratio_min: float = Field(default=0.5, ge=0, le=1)
    """The lower bound of the correction token_mask."""
    sequence_ratio_max: float = Field(default=2.0, ge=1)
    """The upper bound of the corrections sequence_tis, sequence_mis and sequence_mask."""
    sequence_ratio_min: float = Field(default=0.5, ge=0, le=1)
    """The lower bound of the correction sequence_mask."""
    geometric_ratio_max: float = Field(default=1.001, ge=1)
    """The upper bound of the corrections geometric_mask and hierarchical."""
    geometric_ratio_min: float = Field(default=0.999, ge=0, le=1)
    """The lower bound of the corrections geometric_mask and hierarchical."""
    behaviour_ratio_max: float | None = Field(default=None, ge=0)
    """A cap, of 1 or more, on the weight proximal / behaviour of decoupled PPO. If not set, as the
    recipe says, which is 5; 0 means no cap."""
    reference: bool = False
    """Whether the reference is held even where kl_coef is 0. The KL is then measured, and a loss of
    your own sees the reference's log-probs."""
    kl_coef: float = Field(default=0.0, ge=0)
    """The weight of the KL divergence to the reference. 0 means that it does not count."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """The estimator of the KL divergence; see algorithms.md."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL divergence counts: as a term of the loss, or as a penalty on the reward."""
    kl_ratio_weighted: bool = False
    """Whether the KL term is multiplied by the ratio, which makes its gradient unbiased
    off-policy."""
    distill_coef: float | None = Field(default=None, ge=0)
    """The weight of the reverse KL divergence to the teacher. If not set, as the recipe says, which
    is 1 with distill and 0 with every other."""
    distill_in: Literal["advantage", "loss"] = "advantage"
    """Where that divergence counts: in the advantage of each sampled token, or as a term of the
    loss, over the whole vocabulary and with its gradient, which needs `trainer.teacher_model`."""
    distill_top_k: int = Field(default=0, ge=0)
    """With distill_in = "loss": how many of the policy's most likely tokens are told apart; all
    others count as one. 0 means the whole vocabulary."""
    distill_clip: float = Field(default=10.0, ge=0)
    """With distill_in = "advantage": the log-ratio of policy and teacher is clipped to plus and
    minus this. 0 means no clipping."""
    entropy_coef: float = 0.0
    """The weight of the entropy bonus; below 0 it is a penalty."""
    temperature: float = Field(default=0.0, ge=0)
    """The temperature of the learner's log-probs. 0 means that of the rollout."""
    skip_zero_advantage: bool = True
    """Whether samples from which nothing can be learned are left out of the forward pass."""
    overlong_tokens_max: int = Field(default=0, ge=0)
    """The length in tokens at which a response gets the full penalty for being too long. 0 means no
    such shaping."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """The number of tokens before overlong_tokens_max over which the penalty grows from 0."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """What is taken from the reward of a response of overlong_tokens_max tokens."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """The discount factor: per token with the advantages gae and batch, per turn with turn."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """The lambda of GAE, between bias (0) and variance (1)."""
    whiten_advantages: bool = True
    """Whether the advantages of GAE are normalised over the whole batch."""
    value_coef: float = Field(default=0.5, ge=0)
    """The weight of the critic's loss."""
    value_clip: float | None = Field(default=0.2, ge=0)
    """How far a value of the critic may move from its old one in one step. 0 means anywhere."""
    critic_lr: float = Field(default=1e-5, ge=0)
    """The learning rate of the critic."""
    loss_args: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments for a loss of your own, by name; see extending.md."""
    advantage_args: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Arguments for an advantage of your own, by name."""

    @field_validator("loss_args", "advantage_args", mode="before")
    @classmethod
    def _arguments_are_scalars(cls, value: object, info: ValidationInfo) -> object:
        for word, given in value.items() if isinstance(value, dict) else ():
            finite = isinstance(given, float) and isfinite(given)
            require(
                (
                    finite or isinstance(given, (bool, int, str)),
                    f"algorithm.{info.field_name}.{word} = {given}: must be a finite number, "
                    "a string, true or false",
                )
            )
        return value


class TrainerConfig(Section):
    """[trainer] optimizer, packing, precision, sharding."""

    model_config = FINITE

    lr: float = Field(default=1e-6, ge=0)
    """The learning rate of the optimizer, AdamW."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """The decay rates of AdamW's two moving averages."""
    eps: float = Field(default=1e-8, gt=0)
    """What AdamW adds to its denominator, so that it does not divide by zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """The weight decay of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up."""
    warmup_updates: int = Field(default=0, ge=0)
    """The number of updates over which the learning rate grows linearly from 0."""
    num_updates: int = Field(default=0, ge=0)
    """The number of updates at which the schedules linear and cosine end. It stays 0 with
    constant."""
    lr_floor_ratio: float = Field(default=0.0, ge=0, le=1)
    """The share of `lr` at which the schedules linear and cosine end."""
    grad_norm_max: float = Field(default=1.0, ge=0)
    """The norm to which larger gradients are clipped. 0 means no clipping."""
    updates_per_step: int = Field(default=1, ge=1)
    """U: the number of optimizer updates in one step. Update i takes the i-th B/U groups."""
    skipped_updates_max: int = Field(default=10, ge=1)
    """An update whose loss or gradient is not finite is skipped. This many in a row stop the
    run."""
    pack_tokens: int = Field(default=0, ge=0)
    """The number of tokens in one micro-batch. 0 means 4096 on a CPU; on a GPU the memory plan
    chooses, 32768 at most."""
    document_tokens_max: int = Field(default=0, ge=0)
    """The longest prompt and response, in tokens, that the learner takes. 0 means what the model's
    positions allow."""
    streaming: bool = True
    """Whether the learner computes on groups as they come. If off, it waits for the end of a
    step."""
    canonical_order: bool = False
    """Whether a step is computed in a fixed order, so that it does not depend on which group came
    first."""
    compute_dtype: Dtype = "auto"
    """The number format that the learner computes in; `auto` is float32 on a CPU and bfloat16 on
    CUDA."""
    publish_dtype: Dtype = "auto"
    """The number format of the published versions; `auto` is the one that the learner computes
    in."""
    device: str = "auto"
    """The learner's device; `auto` is cuda where there is a GPU, and cpu otherwise."""
    threads: int = Field(default=0, ge=0)
    """The number of CPU threads of the learner. 0 leaves torch's own setting alone."""
    attention: Literal["auto", "varlen", "flex", "blocks", "sdpa", "loop"] = "auto"
    """The attention kernel of the packed decoder; `auto` is the fastest one here."""
    implementation: Literal["auto", "lean", "transformers"] = "auto"
    """Who runs the model: `lean` is our packed decoder, `transformers` the library. `auto` takes
    ours where it knows the family."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether the decoder's layers are compiled; `auto` does so on CUDA."""
    activation_checkpointing: Literal["auto", "none", "layer"] = "auto"
    """With `layer`, the activations of each layer are computed again in the backward pass, which
    saves most of their memory and costs a fifth of the speed. `auto` does so only where a GPU's
    memory is short."""
    logits_chunk_tokens: int = Field(default=0, ge=0)
    """The number of tokens whose logits exist at once. 0 means that it is chosen from the
    vocabulary and the memory."""
    lora_rank: int = Field(default=0, ge=0)
    """The rank of LoRA adapters. 0 means that all parameters are trained."""
    lora_alpha: float = Field(default=16.0, gt=0)
    """The adapters are scaled by lora_alpha / lora_rank."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """The dropout on the adapters' input in training passes; canary, scores and versions have
    none."""
    lora_targets: tuple[str, ...] = ()
    """The linear layers of the blocks that get an adapter, by name; empty means all. The output
    matrix takes none."""
    lora_publish: Literal["adapters", "merged"] = "adapters"
    """What a version is: its adapter, or whole weights with the adapter merged. The learner
    computes with what it publishes: beside the base, or with the merged weights rounded as
    published."""
    trust_remote_code: bool = False
    """Whether Python code that comes with a model may run, for models that run through
    transformers."""
    reference_model: str = ""
    """The directory of the reference model for the KL divergence. If empty, the starting weights
    are the reference."""
    teacher_model: str = ""
    """The directory of a teacher that the learner holds, frozen, for distillation; see
    algorithms.md. Its tokenizer is the model's. Without distill_coef its divergence is measured
    only."""
    router_replay: Literal["auto", "on", "off"] = "auto"
    """Of a mixture of experts: whether each token goes to the experts that it went to when it was
    sampled, as the engine has recorded them; see models.md. `auto` does so with the native engine
    on a CPU."""
    router_aux_coef: float = Field(default=0.0, ge=0)
    """Of a mixture of experts: the weight of the load-balancing loss of its routers, which is that
    of transformers for each document. 0 means none."""
    seed: int = 0
    """The seed of new adapters."""


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

    def changed(self, section: str, **values: Any) -> RunConfig:
        """With other values of some keys, which are not checked again."""
        part = getattr(self, section).model_copy(update=values)
        return self.model_copy(update={section: part})

    def engine_dtype(self, device: str) -> Literal["float32", "bfloat16"]:
        """What instances and evaluator on `device` compute in: as the learner, if nothing is said.
        They then differ by rounding alone, and a canary proves what it can."""
        if self.rollout.dtype is not None:
            return self.rollout.dtype
        if self.trainer.compute_dtype in ("float32", "bfloat16"):
            return self.trainer.compute_dtype
        return "float32" if device == "cpu" else "bfloat16"

    def records_routing(self, device: str) -> bool:
        """Whether instances on `device` record which experts each token went to, where there are
        any, for the learner to go there too."""
        native = self.rollout.backend == "native" and self.trainer.implementation != "transformers"
        auto = native and device == "cpu"
        return {"auto": auto, "on": True, "off": False}[self.trainer.router_replay]

    def engine_options(self, device: str, versions_max: int) -> dict[str, Any]:
        """Arguments of `engine.options.EngineOptions` for one instance on `device`."""
        rollout = self.rollout
        return rollout.model_dump() | {
            "device": device,
            "dtype": self.engine_dtype(device),
            "step_tokens_max": max(rollout.step_tokens_max, rollout.seqs_max),
            "versions_max": rollout.versions_max or versions_max,
            "record_routing": self.records_routing(device),
        }
