"""Who is on which GPU of this machine, what each needs there, and the sizes that follow for each.

    configuration + layout ──▶ seats of each GPU ──▶ Need ──▶ MemoryPlan (setup/memory.py)
                                                                 │
         worker: sizes that the configuration leaves open, its share of the memory

The sizes go to the workers beside the configuration and are written nowhere, so a resumed run is
planned anew. Invariants: what the user has set stays as it is, and all ranks of the learner have
the same sizes. Never touches a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, NamedTuple

from dora_rl.config import RunConfig
from dora_rl.engine.options import EngineOptions
from dora_rl.model.directory import read_spec
from dora_rl.model.spec import ModelSpec
from dora_rl.setup.devices import Card, look_at_cards, visible_gpus
from dora_rl.setup.layout import Layout, plan_layout
from dora_rl.setup.memory import (
    CONTEXT_BYTES,
    GB,
    RESERVE_SHARE,
    MemoryPlan,
    Need,
    num_params,
    plan_memory,
    shelf_bytes,
)
from dora_rl.setup.settings import core_params, is_recomputable
from dora_rl.trainer.losses.recipes import fill
from dora_rl.types import UserError
from dora_rl.workers.engines import adapter_rank

Sizes = dict[str, dict[str, Any]]  # section -> key -> value
SCORED_VERSIONS = 2  # that the learner holds to compute old log-probs under (trainer/scoring.py)
OTHERS_SHARE_MIN = 0.01  # of a card: less than that is the driver's own


@dataclass(slots=True)
class Seats:
    """Who computes on one GPU."""

    learner: str = ""
    instances: list[str] = field(default_factory=list[str])
    evaluator: bool = False

    @property
    def names(self) -> list[str]:
        names = [self.learner, *self.instances, "evaluator" if self.evaluator else ""]
        return [name for name in names if name]


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The plan of one GPU."""

    gpu: str
    seats: Seats
    card: Card
    need: Need
    memory: MemoryPlan

    def table(self) -> list[str]:
        return [f"memory of GPU {self.gpu.removeprefix('cuda:')}", *self.memory.table()]


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plans of all GPUs of a run, and what they mean for each worker."""

    devices: tuple[DevicePlan, ...]
    cards: Mapping[str, Card]  # of all GPUs in sight, in their order
    backend: str = "native"
    enforced: bool = False  # no worker may take more than its part

    @property
    def fits(self) -> bool:
        return all(device.memory.fits for device in self.devices)

    @property
    def versions_max(self) -> int:
        """Resident on each instance; 0: there is none on a planned GPU."""
        return min((d.memory.versions_max for d in self.devices if d.seats.instances), default=0)

    def device_of(self, name: str) -> DevicePlan | None:
        return next((d for d in self.devices if name in d.seats.names), None)

    def sizes(self, name: str) -> Sizes:
        """What the worker has to know beside the configuration."""
        if (device := self.device_of(name)) is None:
            return {}
        plan = device.memory
        sizes: Sizes = {"weights": {"handover": plan.handover}}
        if name == device.seats.learner:
            return sizes | {
                "trainer": {
                    "pack_tokens": plan.pack_tokens,
                    "activation_checkpointing": plan.checkpointing,
                    "logits_chunk_tokens": plan.chunk_tokens,
                }
            }
        if name == "evaluator":
            return {
                "rollout": {
                    "kv_bytes_max": plan.evaluator_kv_bytes,
                    "num_blocks": 0,
                    "seqs_max": plan.evaluator_requests,
                    "step_tokens_max": plan.evaluator_step_tokens,
                }
            }
        # vLLM measures what its weights and graphs leave of its share.
        if self.backend != "native":
            return {}
        fewer = plan.num_requests < device.need.num_requests
        at_once = {"seqs_max": plan.num_requests} if fewer else {}
        return {"rollout": {"kv_bytes_max": plan.kv_bytes, **at_once}} | sizes

    def share(self, name: str) -> float | None:
        """Of its whole card, with what nobody has planned for divided in proportion; None: the GPU
        of this worker is not planned."""
        if (device := self.device_of(name)) is None:
            return None
        plan, others = device.memory, device.need.others_bytes
        scale = (plan.total_bytes - others) / max(1, plan.planned_bytes - others)
        return min(1.0, plan.of(name) * scale / device.card.total_bytes)

    def limit(self, name: str) -> float:
        """The share of its card that torch's allocator may hold, so that no worker keeps what
        another needs; 0: no limit."""
        device, share = self.device_of(name), self.share(name)
        if device is None or share is None:
            return 0.0
        shared = len(device.seats.names) > 1 and self.backend == "native"
        if not (self.enforced or shared):
            return 0.0
        beside = CONTEXT_BYTES  # what is not torch's
        if device.memory.handover and name == device.seats.learner:
            beside += shelf_bytes(num_params(device.need.spec), device.need.item_bytes)
        return max(0.01, share - beside / device.card.total_bytes)

    def table(self) -> list[str]:
        return [row for device in self.devices for row in device.table()]

    def document(self) -> list[dict[str, Any]]:
        """As JSON."""
        return [
            {
                "gpu": device.gpu,
                "total_bytes": device.memory.total_bytes,
                "planned_bytes": device.memory.planned_bytes,
                "fits": device.memory.fits,
                "lines": [
                    {"who": line.who, "what": line.what, "bytes": line.num_bytes}
                    for line in device.memory.lines
                ],
                "sizes": {name: self.sizes(name) for name in device.seats.names},
                "versions_max": device.memory.versions_max,
            }
            for device in self.devices
        ]


def with_memory(config: RunConfig, layout: Layout) -> Layout:
    """The layout with the memory of its GPUs divided; as it is where there are none to divide."""
    if not layout.device.startswith("cuda") or config.runtime.world == "ray":
        return layout
    gpus = (layout.device,) if ":" in layout.device else visible_gpus()
    cards = look_at_cards(gpus)
    if not gpus or len(cards) < len(gpus):
        return layout
    return planned(layout, plan_run(config, layout, cards))


def imagined(config: RunConfig, device_memory_gb: float) -> Layout:
    """As if this machine had such GPUs: as many as it has, or one. Needs none."""
    gpus = visible_gpus() or ("0",)
    layout, size = plan_layout(config, "cuda", gpus), int(device_memory_gb * GB)
    return planned(layout, plan_run(config, layout, dict.fromkeys(gpus, Card(size, size))))


def planned(layout: Layout, plan: RunPlan | None) -> Layout:
    resident = plan.versions_max if plan else 0
    fewer = min(layout.resident_max, resident or layout.resident_max)
    return replace(layout, memory=plan, resident_max=fewer)


def plan_run(config: RunConfig, layout: Layout, cards: Mapping[str, Card]) -> RunPlan | None:
    """None where nothing can be said: a model that only its own library knows."""
    try:
        spec = read_spec(config.model.path)
    except UserError:
        return None
    seats = seats_of(config, layout, tuple(cards))
    needs = {
        gpu: need_of(config, spec, layout, seats[gpu], others_of(config, cards[gpu]))
        for gpu in seats
    }
    totals = {gpu: total_of(config, cards[gpu]) for gpu in seats}
    plans = {gpu: plan_memory(needs[gpu], totals[gpu]) for gpu in seats}
    if len(plans) > 1:
        needs = {gpu: _as_others(needs[gpu], list(plans.values())) for gpu in seats}
        plans = {gpu: plan_memory(needs[gpu], totals[gpu]) for gpu in seats}
    devices = (DevicePlan(gpu, seats[gpu], cards[gpu], needs[gpu], plans[gpu]) for gpu in seats)
    enforced = config.runtime.device_memory_gb > 0
    return RunPlan(tuple(devices), cards, config.rollout.backend, enforced)


def _as_others(need: Need, plans: Sequence[MemoryPlan]) -> Need:
    """Ranks of the learner have the sizes of the one with the least room, instances likewise."""
    trained = [plan for plan in plans if plan.pack_tokens]
    held = [plan for plan in plans if any(line.what.startswith("KV") for line in plan.lines)]
    if need.learner and trained:
        least = min(trained, key=lambda p: (p.checkpointing == "none", p.pack_tokens))
        need = replace(
            need,
            pack_tokens=min(plan.pack_tokens for plan in trained),
            checkpointing=least.checkpointing,
            chunk_tokens=min(plan.chunk_tokens for plan in trained),
        )
    if need.num_instances and held:
        need = replace(
            need, versions_max=min(plan.versions_max for plan in held), versions_fixed=True
        )
    return need


def seats_of(config: RunConfig, layout: Layout, gpus: Sequence[str]) -> dict[str, Seats]:
    """Those that have somebody whose memory is ours to plan. An instance of several GPUs has them
    to itself, and vLLM divides them."""
    seats = {gpu: Seats() for gpu in gpus}
    wanted = config.trainer.device
    first = int(wanted.partition(":")[2] or 0) if wanted.startswith("cuda") else 0
    if wanted != "cpu":
        for rank, name in enumerate(layout.learners):
            seats[gpus[(first + rank) % len(gpus)]].learner = name
    if config.data.eval:
        seats[gpus[0]].evaluator = True
    for name in layout.instances:
        own = layout.place_of(name).gpus or gpus[:1]
        if len(own) == 1:
            seats[own[0]].instances.append(name)
    return {gpu: taken for gpu, taken in seats.items() if taken.names}


def total_of(config: RunConfig, card: Card) -> int:
    """What the plan may count with: the card, or the smaller one that is asked for."""
    asked = int(config.runtime.device_memory_gb * GB)
    return min(asked, card.total_bytes) if asked else card.total_bytes


def others_of(config: RunConfig, card: Card) -> int:
    """What other programs have of it. A smaller card that is asked for lies in what they leave."""
    used = card.total_bytes - card.free_bytes
    if config.runtime.device_memory_gb:
        return max(0, total_of(config, card) - card.free_bytes)
    return used if used > OTHERS_SHARE_MIN * card.total_bytes else 0


def need_of(
    config: RunConfig, spec: ModelSpec, layout: Layout, seats: Seats, others_bytes: int
) -> Need:
    """What the configuration asks of one GPU."""
    rollout, trainer = config.rollout, config.trainer
    options = EngineOptions(**config.engine_options("cuda", layout.resident_max))
    params = core_params(config)
    compute = "bfloat16" if trainer.compute_dtype == "auto" else trainer.compute_dtype
    half = 4 if compute == "float32" else 2
    asked = params.inflight_groups * params.group_size
    held = config.evaluation.num_prompts * (1 + config.evaluation.num_samples)
    ranks = len(layout.learners)
    return Need(
        spec,
        layout.resident_max,
        versions_fixed=bool(rollout.versions_max),
        num_instances=len(seats.instances),
        names=tuple(seats.instances),
        learner=bool(seats.learner),
        learner_name=seats.learner or "learner",
        num_ranks=ranks,
        evaluator=seats.evaluator,
        evaluator_requests=min(held, rollout.seqs_max),
        others_bytes=others_bytes,
        lora_rank=trainer.lora_rank,
        adapters=bool(adapter_rank(config)),
        base_bytes=half if ranks == 1 and spec.dtype == compute else 4,
        compute_bytes=half,
        item_bytes=4 if options.dtype == "float32" else 2,
        routing=options.record_routing,
        num_requests=min(rollout.seqs_max, -(-asked // len(layout.instances))),
        request_tokens_max=request_tokens(config, options.context_limit(spec.context_max)),
        step_tokens_max=options.step_tokens_max,
        compiled=trainer.compile == "on" or (trainer.compile == "auto" and not trainer.lora_rank),
        rechecks=config.audit.recompute_share > 0 and ranks == 1 and is_recomputable(config),
        num_twins=num_twins(config),
        teacher=teacher_of(config),
        critic=fill(config.algorithm).advantage == "gae",
        kv_bytes=rollout.num_blocks * options.block_bytes(spec) or rollout.kv_bytes_max,
        pack_tokens=trainer.pack_tokens,
        checkpointing=trainer.activation_checkpointing.replace("auto", ""),
        chunk_tokens=trainer.logits_chunk_tokens,
        handover=wants_handover(config, ranks),
    )


def wants_handover(config: RunConfig, num_ranks: int) -> bool | None:
    """None: where there is room. One rank holds all of a version; vLLM loads it from files."""
    if num_ranks > 1 or config.rollout.backend != "native":
        return False
    return None if config.weights.handover == "auto" else config.weights.handover


def request_tokens(config: RunConfig, context: int) -> int:
    """The longest that a request may become: a prompt and its response, or an episode."""
    turns = max((entry.turns_max for entry in config.env.environments), default=1)
    prompt = config.data.prompt_tokens_max or context
    return min(context, prompt + turns * config.rollout.tokens_max)


def teacher_of(config: RunConfig) -> ModelSpec | None:
    """The shape of a teacher that the learner holds."""
    held = config.trainer.teacher_model
    return read_spec(held) if held else None


def num_twins(config: RunConfig) -> int:
    """Frozen copies that the learner holds: the reference, and versions to score under."""
    options = fill(config.algorithm)
    has_reference = options.reference or options.kl_coef != 0.0
    several = config.trainer.updates_per_step > 1 and options.old_logprobs == "proximal"
    older = config.orchestration.max_staleness if options.old_logprobs == "behaviour" else 0
    one = several or (older and adapter_rank(config))
    return int(has_reference) + (1 if one else min(SCORED_VERSIONS, older))


# ---- what to change where a run does not fit: each change is planned, none is guessed

WAYS_MAX = 4
LORA_RANK = 32
TOKENS_MIN, SEQS_MIN = 256, 16


class Change(NamedTuple):
    """One key to set, and what to say beside it."""

    section: str
    key: str
    value: Any
    more: str = ""

    def of(self, config: RunConfig) -> RunConfig:
        return config.changed(self.section, **{self.key: self.value})

    @property
    def text(self) -> str:
        return f"{self.section}.{self.key}={'[]' if self.value == () else self.value}{self.more}"


def candidates(config: RunConfig, plan: RunPlan) -> list[Change]:
    """Changes that exist, the cheapest first: what costs speed before what costs quality. Of one
    kind the smallest comes first."""
    rollout, trainer = config.rollout, config.trainer
    has_learner = any(device.seats.learner for device in plan.devices)
    has_evaluator = any(device.seats.evaluator for device in plan.devices)
    older = config.algorithm.old_logprobs in ("behaviour", "proximal")
    offers = [
        (rollout.num_blocks, Change("rollout", "num_blocks", 0)),
        (rollout.kv_bytes_max, Change("rollout", "kv_bytes_max", 0)),
        (
            has_learner and trainer.activation_checkpointing == "none",
            Change("trainer", "activation_checkpointing", "layer"),
        ),
        (has_learner and trainer.pack_tokens, Change("trainer", "pack_tokens", 0)),
        (rollout.versions_max > 1, Change("rollout", "versions_max", 0)),
        (rollout.num_instances > 1, Change("rollout", "num_instances", 1)),
        *((True, Change("rollout", "seqs_max", n)) for n in halved(rollout.seqs_max, SEQS_MIN)),
        (has_evaluator, Change("data", "eval", (), " (evaluate afterwards)")),
        (older, Change("algorithm", "old_logprobs", "rollout")),
        *(
            (True, Change("orchestration", "max_staleness", staleness))
            for staleness in range(config.orchestration.max_staleness - 1, 0, -1)
        ),
        *(
            (True, Change("rollout", "tokens_max", n))
            for n in halved(rollout.tokens_max, TOKENS_MIN)
        ),
        (has_learner and not trainer.lora_rank, Change("trainer", "lora_rank", LORA_RANK)),
    ]
    return [change for offered, change in offers if offered]


def halved(value: int, least: int) -> Iterator[int]:
    """
    >>> list(halved(100, 20))
    [50, 25]
    """
    while (value := value // 2) >= least:
        yield value


def memory_problems(config: RunConfig, layout: Layout) -> list[str]:
    """One line for each GPU that is too small; none where the run fits, or nothing is known."""
    plan = layout.memory
    wrong = [device for device in plan.devices if not device.memory.fits] if plan else []
    if plan is None or not wrong:
        return []
    cards = plan.cards

    def fits(changes: Sequence[Change]) -> bool:
        other = reduce(lambda changed, change: change.of(changed), changes, config)
        try:
            found = plan_run(other, plan_layout(other, layout.device, tuple(cards)), cards)
        except UserError:  # the change does not go with the rest of the configuration
            return False
        return found is not None and found.fits

    ways = ways_out(candidates(config, plan), fits)
    return [f"{needs_line(device)}: {ways}" for device in wrong]


def needs_line(device: DevicePlan) -> str:
    memory = device.memory
    # The plan that did not fit is the smallest there is; a card keeps a reserve beside it.
    smallest = int(memory.planned_bytes / (1.0 - RESERVE_SHARE))
    parts = {line.who: memory.of(line.who) for line in memory.lines}
    listed = ", ".join(f"{who} {num_bytes / GB:.1f}" for who, num_bytes in parts.items())
    return (
        f"GPU {device.gpu.removeprefix('cuda:')} has {memory.total_bytes / GB:.1f} GB and the run "
        f"needs {smallest / GB:.1f} GB at least ({listed})"
    )


def ways_out(changes: Sequence[Change], fits: Callable[[Sequence[Change]], bool]) -> str:
    """Single changes that are enough, one of each kind; where none is, several together: the most
    of each kind, then without whatever is not needed."""
    enough: dict[str, Change] = {}
    for change in changes:
        if change.key not in enough and fits([change]):
            enough[change.key] = change
    if enough:
        return f"set {' or '.join([change.text for change in enough.values()][:WAYS_MAX])}"
    needed = most = list({change.key: change for change in changes}.values())
    if not fits(most):
        return "no setting of this program makes it fit; use a larger card or a smaller model"
    for change in reversed(most[:-1]):
        fewer = [other for other in needed if other is not change]
        needed = fewer if fits(fewer) else needed
    return f"set {' and '.join(change.text for change in needed)}"
