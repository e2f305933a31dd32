"""How a run runs: [orchestration], [checkpoint], [weights], [evaluation], [logging], [audit],
[runtime] and [resources].

Only says what is wanted. Nothing here performs work.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal

from pydantic import Field, model_validator

from dora_rl.config.section import Section
from dora_rl.types import Mode

# Keys that had another name in older files and runs.
RENAMED = {"runtime.kind": "runtime.world"}
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class OrchestrationConfig(Section):
    """[orchestration] which paradigm, how stale, how much in flight.

    Zero means "derive it": groups in flight from the batch, samples needed from the group.
    """

    mode: Mode = Mode.MULTI_VERSION
    """The training paradigm; see concepts.md."""
    max_staleness: int = Field(default=2, ge=0)
    """K: the oldest version that a step may train on is its own version minus K."""
    num_steps: int = Field(default=100, ge=1)
    """The number of training steps of the whole run."""
    batch_groups: int = Field(default=32, ge=1)
    """B: the number of prompts, each with its group of responses, in one training step."""
    inflight_groups: int = Field(default=0, ge=0)
    """How many groups the run keeps in flight at once. 0 means one and a half batches."""
    ready_max: int = Field(default=0, ge=0)
    """How many groups may lie ready for training before no new ones are started. 0 means K batches,
    and at least one."""
    samples_min: int = Field(default=0, ge=0)
    """A group trains if at least this many of its samples were scored. Failed samples are left out,
    and the advantages are those of the rest. 0 means half of the group, and at least two. With
    `rollout.num_samples` here, a single failed sample costs its whole group."""
    freshness: Literal["auto", "off"] = "auto"
    """Under "auto" the mode `multi_version` holds groups back that would only age: it looks for the
    smallest staleness at which the learner does not wait for groups. Under "off" groups are started
    as soon as the bound, `inflight_groups` and `ready_max` allow it."""
    streaming: bool = True
    """Whether the learner trains on groups while the rest of the batch is still being generated."""
    kv_moves: bool = True
    """Whether a running request takes its KV cache along when it moves to another instance. If off,
    it is prefilled again there."""
    repartition: bool = True
    """Whether instances change their version with the load. If off, they change only when they
    must."""
    level_running: bool = False
    """Whether the running requests of a version are also levelled over its instances."""
    filter_equal: bool = False
    """Whether groups whose rewards are all equal are left out of training."""
    filtered_max: int = Field(default=1000, ge=1)
    """The run stops when this many groups in a row were filtered."""
    failed_share_max: float = Field(default=0.5, ge=0, le=1)
    """The run stops, and can be resumed, when more than this share of its prompts have failed."""
    attempts_max: int = Field(default=4, ge=1)
    """A sample counts as failed after this many starts, or scores, without progress. A prompt is
    set aside after this many failed groups, or losses of an instance that it had to itself."""
    losses_max: int = Field(default=2, ge=1)
    """A request that ran on this many lost instances in a row, and gained no token in between, is
    tried alone from then on, until it is clear whether it kills them."""
    trainer_losses_max: int = Field(default=3, ge=0)
    """The run stops, and can be resumed, when the learner was lost this often in one and the same
    step. 0 means never."""
    instance_losses_max: int = Field(default=30, ge=0)
    """The run stops, and can be resumed, when this many instances were lost in a row before any
    request had gained a token. 0 means never."""
    load_failures_max: int = Field(default=12, ge=0)
    """The run stops, and can be resumed, when a version was refused this often (because of a wrong
    checksum or canary, say) and no instance holds it. 0 means never."""
    oversample: float = Field(default=1.25, ge=1)
    """In the mode `replication`: how many groups are issued for each one that is needed."""
    fill_older_max: int = Field(default=0, ge=0)
    """How many groups per step may be started on idle slots of older versions."""
    rebalance_period_s: float = Field(default=30.0, gt=0)
    """The seconds between two looks at how instances are divided over versions."""
    report_timeout_s: float = Field(default=60.0, gt=0)
    """An instance that has not reported for this many seconds is replaced."""
    progress_timeout_s: float = Field(default=300.0, gt=0)
    """An instance whose requests gain no token for this many seconds is replaced, and a single
    request that gains none is started again. Turns of environments do not count."""
    load_timeout_s: float = Field(default=300.0, gt=0)
    """How many seconds an instance may take to load a version, and a worker to start."""
    move_timeout_s: float = Field(default=60.0, gt=0)
    """How many seconds a request that moves may take to arrive."""
    trainer_timeout_s: float = Field(default=1800.0, gt=0)
    """A learner that makes no progress for this many seconds is restarted."""


class CheckpointConfig(Section):
    """[checkpoint] how often, how many, which is best."""

    every_steps: int = Field(default=10, ge=0)
    """The number of steps between two checkpoints. 0 means none."""
    state_every_s: float = Field(default=60.0, ge=0)
    """The optimizer's moments are written beside training every so many seconds; 0 means after
    every step. A learner that dies loses at most that much of them. Its weights and its schedule
    are exact in any case."""
    keep: int = Field(default=2, ge=0)
    """How many of the newest checkpoints are kept. 0 keeps all."""
    keep_best: bool = True
    """Whether the best version that was evaluated is kept: its sealed weights, and its checkpoint
    where it has one. It goes when a better one is found; `export --step best` gives it."""
    best_metric: str = "eval/greedy"
    """The metric of the evaluation by which the best version is chosen."""
    best_is_max: bool = True
    """Whether the largest value of that metric is the best. If off, the smallest is."""
    dtype: Dtype = "auto"
    """The number format of the model files; `auto` is float32 on a CPU and bfloat16 on a GPU. The
    float32 masters are always beside them."""
    shard_bytes_max: int = 4 << 30
    """The largest size of one safetensors file, in bytes."""


class WeightsConfig(Section):
    """[weights] the store of sealed versions."""

    root: str = ""
    """The directory where live versions lie. If empty, it is one of the run's own in /dev/shm. No
    other user may be able to write to it."""
    verify: bool = True
    """Whether each process hashes the bytes of a version before it uses it for the first time."""
    handover: bool | Literal["auto"] = "auto"
    """Whether instances on the learner's own GPU copy each new version from its memory instead of
    loading it from the host's. It takes the size of a version there; "auto" means where the memory
    plan has room for it. It concerns whole weights, not adapters."""


class EvaluationConfig(Section):
    """[evaluation] held-out prompts, generated under one pinned version while training goes on."""

    every_steps: int = Field(default=0, ge=0)
    """The number of steps between two evaluations. 0 means that there is one before the first step
    and one after the last."""
    num_prompts: int = Field(default=200, ge=1)
    """How many of the held-out prompts are answered."""
    num_samples: int = Field(default=1, ge=1)
    """How many sampled responses each prompt gets, beside the greedy one; pass@k is over these."""
    success_min: float = Field(default=1.0, allow_inf_nan=False)
    """A response counts as passed, for pass@k, if its reward is at least this."""
    failed_share_max: float = Field(default=0.1, ge=0, le=1)
    """Scores are over the answers that could be scored, with the number of the others beside them.
    Where a larger share than this failed, the evaluation has no score and is shown as failed."""


class LoggingConfig(Section):
    """[logging] what is written beside metrics.jsonl and the event log."""

    rollouts: bool = True
    """Whether texts are kept: every trained sample as a line of rollouts.jsonl, and the beginning
    of each prompt in prompts.jsonl."""
    progress: bool = True
    """Whether the run shows its progress on the console."""
    sinks: tuple[str, ...] = ()
    """Where metrics also go: `tensorboard`, `wandb`, `mlflow` or `trackio` where installed, or
    `path/to/file.py:Name` for a writer of your own, see extending.md."""
    sink_options: dict[str, dict[str, Any]] = Field(default_factory=dict[str, dict[str, Any]])
    """Settings of a sink, by its name: arguments of `wandb.init`, of `trackio.init` or of
    TensorBoard's writer; `tracking_uri`, `experiment` and `run_name` of MLflow; whatever your own
    writer reads from `facts.options`."""
    samples_shown: int = Field(default=8, ge=0)
    """How many samples of each step the sinks show as a table, from the best to the worst."""


class AuditConfig(Section):
    """[audit] what a run checks about itself while it goes on; see audit.md."""

    recompute_share: float = Field(default=0.01, ge=0, le=1)
    """The share of trained samples that the learner computes again while it waits for work, from
    the sealed weights of the version that the log names. The log has the outcome, and `dora-rl
    audit` counts a difference beyond the tolerance as a finding. Not done with several learner
    ranks, and not where top_k, top_p or min_p are set."""
    tolerance: float = Field(default=0.0, ge=0)
    """How far the log-probs of engine and learner may lie apart, per token on average. 0 means
    0.0001 where both compute in float32, and 0.05 otherwise."""


class RuntimeConfig(Section):
    """[runtime] where the workers run."""

    world: Literal["local", "inline", "ray"] = "local"
    """Where the run takes place: `local` is a process for each worker on this machine, `inline` all
    of them in one process (for a debugger in a reward or a loss), `ray` a Ray cluster."""
    run_dir: str = "runs/latest"
    """The directory that everything of the run is written to."""
    seed: int = 0
    """The seed of sampling. Together with the numbers of prompt and sample it fixes every draw."""
    device: str = "auto"
    """The device of the run, such as `cpu`, `cuda` or `cuda:1`. `auto` is cuda where there is a
    GPU, and cpu otherwise."""
    device_memory_gb: float = Field(default=0.0, ge=0)
    """The run uses no more than this of each GPU, in units of 1,000,000,000 bytes: as on a smaller
    card, or beside other programs. 0 means all that is free."""
    threads: int = Field(default=0, ge=0)
    """The number of CPU threads of every worker. 0 leaves it to each section."""
    grace_s: float = Field(default=30.0, gt=0)
    """How many seconds the workers have to end cleanly after a signal."""
    watchdog_s: float = Field(default=60.0, gt=0)
    """After this many seconds without progress the console names what waits for what."""
    mps: bool | Literal["auto"] = False
    """Whether kernels of instances and learner run side by side on one shared GPU (NVIDIA's MPS). A
    fault on the device in one process then ends them all; the run goes on from its journals. With
    `auto` that is so wherever MPS can be started."""
    mps_learner_percent: int = Field(default=100, ge=10, le=100)
    """Under MPS, where instances decode while the learner trains: how much of the GPU's processors
    the learner may use, in percent. The longest responses hold up a run, not the learner."""
    mps_learner_yields: bool = False
    """Under MPS, likewise: whether kernels of the instances go first where both wait for a
    processor."""
    address: str = ""
    """The address of the Ray cluster. If empty, the run starts one of its own on this machine."""
    bind_address: str = ""
    """On a cluster: the address that workers listen at on their host. If empty, it is the one that
    Ray knows the host by. `0.0.0.0` is every interface."""
    tls_certificate: str = ""
    """On a cluster: the path of this host's certificate (PEM), the same path on every host. With it
    all connections between hosts are encrypted; see cluster.md."""
    tls_key: str = ""
    """The path of the certificate's private key."""
    tls_authority: str = ""
    """The path of the certificate that has signed those of all hosts. It should sign no others."""

    @model_validator(mode="after")
    def _certificates_are_whole(self) -> RuntimeConfig:
        given = (self.tls_certificate, self.tls_key, self.tls_authority)
        if any(given) and not all(given):
            raise ValueError("give tls_certificate, tls_key and tls_authority, or none of them")
        if any(given) and self.world != "ray":
            raise ValueError('tls_certificate is for runs on several hosts: world = "ray"')
        return self

    @model_validator(mode="before")
    @classmethod
    def _takes_old_names(cls, data: object) -> object:
        """Of a section made by hand; files and overrides are renamed where they are read."""
        if isinstance(data, dict) and "kind" in data and "world" not in data:
            warnings.warn("runtime.kind is now called runtime.world", FutureWarning, stacklevel=2)
            return {"world" if key == "kind" else key: value for key, value in data.items()}
        return data


class ResourcesConfig(Section):
    """[resources] devices of a cluster: how many for each role."""

    learner_ranks: int = Field(default=1, ge=1)
    """The number of processes that share the learner (FSDP2); each needs a GPU."""
    devices_per_instance: int = Field(default=1, ge=1)
    """The number of GPUs of one instance. More than one means vLLM's tensor parallelism, since the
    native engine uses one."""
    elastic_instances: int = Field(default=0, ge=0)
    """How many of the instances sit on the learner's devices and sleep while it computes."""
    instances_max: int = Field(default=0, ge=0)
    """The most instances there may be when hosts with room join a running cluster. 0 means as many
    as `rollout.num_instances`."""
    storage_shards: int = Field(default=1, ge=1)
    """The number of processes on the controller's host that keep the samples of a cluster run."""
