"""What to change where a run does not fit on its GPUs: each change is planned, none is guessed.

Never touches a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dora_rl.config import RunConfig
from dora_rl.setup.layout import Layout, plan_layout
from dora_rl.setup.memory import GB, RESERVE_SHARE
from dora_rl.setup.plan import DevicePlan, RunPlan, plan_run
from dora_rl.types import UserError

Again = Callable[[RunConfig], RunPlan | None]
WAYS_MAX = 4
LORA_RANK = 32
TOKENS_MIN, SEQS_MIN = 256, 16


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to set: as the user writes it, and in the configuration."""

    text: str
    section: str
    values: dict[str, Any]

    def of(self, config: RunConfig) -> RunConfig:
        part = getattr(config, self.section).model_copy(update=self.values)
        return config.model_copy(update={self.section: part})

    @property
    def key(self) -> str:
        return self.text.partition("=")[0]


def change(section: str, more: str = "", **values: Any) -> Change:
    shown = " ".join(f"{section}.{key}={_toml(value)}" for key, value in values.items())
    return Change(shown + more, section, values)


def _toml(value: object) -> str:
    return "[]" if value == () else str(value)


def candidates(config: RunConfig, plan: RunPlan) -> Iterator[Change]:
    """Changes that exist, the cheapest first: what costs speed before what costs quality. Of one
    kind the smallest comes first."""
    rollout, trainer = config.rollout, config.trainer
    has_learner = any(device.seats.learner for device in plan.devices)
    if rollout.num_blocks:
        yield change("rollout", num_blocks=0)
    if rollout.kv_bytes_max:
        yield change("rollout", kv_bytes_max=0)
    if has_learner and trainer.activation_checkpointing == "none":
        yield change("trainer", activation_checkpointing="layer")
    if has_learner and trainer.pack_tokens:
        yield change("trainer", pack_tokens=0)
    if rollout.versions_max > 1:
        yield change("rollout", versions_max=0)
    if rollout.num_instances > 1:
        yield change("rollout", num_instances=1)
    for seqs in halved(rollout.seqs_max, SEQS_MIN):
        yield change("rollout", seqs_max=seqs)
    if any(device.seats.evaluator for device in plan.devices):
        yield change("data", " (evaluate afterwards)", eval=())
    if config.algorithm.old_logprobs in ("behaviour", "proximal"):
        yield change("algorithm", old_logprobs="rollout")
    for staleness in range(config.orchestration.max_staleness - 1, 0, -1):
        yield change("orchestration", max_staleness=staleness)
    for tokens in halved(rollout.tokens_max, TOKENS_MIN):
        yield change("rollout", tokens_max=tokens)
    if has_learner and not trainer.lora_rank:
        yield change("trainer", lora_rank=LORA_RANK)


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

    def again(other: RunConfig) -> RunPlan | None:
        try:
            return plan_run(other, plan_layout(other, layout.device, tuple(cards)), cards)
        except UserError:  # the change does not go with the rest of the configuration
            return None

    ways = ways_out(config, plan, again)
    return [f"{needs_line(device)}: {ways}" for device in wrong]


def needs_line(device: DevicePlan) -> str:
    memory = device.memory
    parts = {line.who: memory.of(line.who) for line in memory.lines}
    listed = ", ".join(f"{who} {num_bytes / GB:.1f}" for who, num_bytes in parts.items())
    return (
        f"GPU {device.gpu.removeprefix('cuda:')} has {memory.total_bytes / GB:.1f} GB and the run "
        f"needs {smallest_card(device) / GB:.1f} GB at least ({listed})"
    )


def smallest_card(device: DevicePlan) -> int:
    """The plan that did not fit is the smallest there is; a card keeps a reserve beside it."""
    return int(device.memory.planned_bytes / (1.0 - RESERVE_SHARE))


def ways_out(config: RunConfig, plan: RunPlan, again: Again) -> str:
    """Single changes that are enough, one of each kind; where none is, several together."""
    enough: dict[str, Change] = {}
    for way in candidates(config, plan):
        if way.key not in enough and _fits(way.of(config), again):
            enough[way.key] = way
    told = [way.text for way in enough.values()]
    if told:
        return f"set {' or '.join(told[:WAYS_MAX])}"
    return together(config, plan, again)


def together(config: RunConfig, plan: RunPlan, again: Again) -> str:
    """The most of each kind, then without whatever is not needed."""
    most = list({way.key: way for way in candidates(config, plan)}.values())
    if not _fits(_with(config, most), again):
        return "no setting of this program makes it fit; use a larger card or a smaller model"
    needed = list(most)
    for way in reversed(most[:-1]):
        fewer = [other for other in needed if other is not way]
        if _fits(_with(config, fewer), again):
            needed = fewer
    return f"set {' and '.join(way.text for way in needed)}"


def _with(config: RunConfig, ways: Sequence[Change]) -> RunConfig:
    for way in ways:
        config = way.of(config)
    return config


def _fits(config: RunConfig, again: Again) -> bool:
    found = again(config)
    return found is not None and found.fits
