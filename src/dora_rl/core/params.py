"""What the core needs to know of a run: sizes, bounds, limits, costs, and what its mode means.

Pure data. Every limit the core enforces is a field here; nothing is hidden in code. The five modes
are small policies over the same core: a policy only answers questions, the handlers are the same.

    sync           K = 0, train when the batch is full
    one_step_off   K = 1, one batch at a time, train when the batch is full
    partial        K as set, running requests move to each new version (C1 is given up)
    replication    K = 0, issue more than needed, end the slow rest as surplus (C2 is given up)
    multi_version  K as set, a trajectory stays on the version it began with
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dora_rl.types import Mode, UserError

_AT_LEAST_ONE = (
    "batch_groups",
    "group_size",
    "num_steps",
    "inflight_groups",
    "ready_max",
    "event_actions_max",
)


@dataclass(frozen=True, slots=True)
class MoveCost:
    """Figures for one decision: move a request's KV cache, or prefill it again elsewhere?"""

    kv_bytes_per_token: float = 2.0e5
    link_bytes_per_s: float = 2.0e10
    move_overhead_s: float = 0.02
    prefill_tokens_per_s: float = 2.0e4


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long without progress before a wait is broken and its work restarted elsewhere."""

    report_s: float = 60.0
    load_s: float = 300.0
    move_s: float = 60.0
    score_s: float = 60.0
    trainer_s: float = 1800.0
    progress_s: float = 0.0  # for running requests to gain a token; 0: not watched (older logs)


@dataclass(frozen=True, slots=True)
class Params:
    """One run's fixed numbers.

    `max_staleness` is K, `batch_groups` is B, `num_steps` - 1 is S in docs/staleness.md.
    """

    mode: Mode = Mode.MULTI_VERSION
    max_staleness: int = 2
    batch_groups: int = 8
    group_size: int = 4
    num_steps: int = 10
    inflight_groups: int = 16
    ready_max: int = 1_000_000
    samples_min: int = 0  # 0: every sample of a group must be scored
    updates_per_step: int = 1
    streaming: bool = True
    kv_moves: bool = True
    repartition: bool = True
    level_running: bool = False
    level_slack: float = 0.5  # share of an instance's slots
    filter_equal: bool = False
    filtered_max: int = 1_000
    failed_share_max: float = 0.5
    failed_min: int = 20
    attempts_max: int = 4
    oversample: float = 1.25
    fill_older_max: int = 0
    rebalance_period_s: float = 30.0
    rebalance_min_s: float = 1.0
    flip_gain_min: float = 0.75  # instances a version must lack before one is flipped for it
    event_actions_max: int = 400  # of one event; decisions beyond it are left to the next ones
    kv_high: float = 0.95
    kv_low: float = 0.80
    # Faults that repeat. Zero switches a rule off: logs of older releases do not have the field
    # and were decided without it.
    #
    # Losses of its instance in a row, nothing gained in between, that make a request a suspect,
    # which is tried alone. 0: every loss counts as an attempt.
    losses_max: int = 0
    # Tokens that a suspect gains alone before others join it again; not fewer than lie between
    # two writes of the journal, so that it has really got further.
    clear_tokens: int = 64
    group_failures_max: int = 0  # failed groups of a prompt that set it aside
    trainer_losses_max: int = 0  # losses of the learner in one step that stop the run
    instance_losses_max: int = 0  # lost instances in a row, no request having gained, that stop it
    load_failures_max: int = 0  # failed loads from the store of a version nobody holds, same
    # Versions that may be committed and not on disk yet: 1, or 0 in logs of older releases, where a
    # version was on disk before it was committed.
    durable_behind: int = 0
    # Whether groups are held back that would only age (`freshness`); logs of older releases were
    # decided without.
    freshness: bool = False
    # Pools of prompts (`curriculum`): how many, 0 being none; the weights of the sources that they
    # are of, relative to the largest, in turn; the least share of one; over how many of its groups,
    # about, what they told is kept.
    pools: int = 0
    pool_weights: tuple[float, ...] = ()
    pool_share_min: float = 0.1
    pool_recent: int = 1
    cost: MoveCost = MoveCost()
    deadlines: Deadlines = Deadlines()

    def validate(self) -> None:
        """Refuse numbers no run can keep its promises with."""
        for holds, message in [
            *(
                (getattr(self, name) >= 1, f"{name} must be at least 1, not {getattr(self, name)}")
                for name in _AT_LEAST_ONE
            ),
            (self.max_staleness >= 0, f"max_staleness must be 0 or more, not {self.max_staleness}"),
            (
                self.batch_groups % self.updates_per_step == 0,
                f"batch_groups ({self.batch_groups}) must be a multiple of updates_per_step "
                f"({self.updates_per_step})",
            ),
            (
                self.samples_min <= self.group_size,
                f"samples_min ({self.samples_min}) is more than group_size ({self.group_size})",
            ),
            (self.pools >= 0, f"pools must be 0 or more, not {self.pools}"),
            (
                0 < self.pool_share_min <= 1,
                f"pool_share_min must be above 0 and at most 1, not {self.pool_share_min}",
            ),
            (
                all(0 < weight <= 1 for weight in self.pool_weights),
                f"pool_weights must be above 0 and at most 1, not {self.pool_weights}",
            ),
            (self.pool_recent >= 1, f"pool_recent must be at least 1, not {self.pool_recent}"),
            (self.oversample >= 1, f"oversample must be at least 1, not {self.oversample}"),
            (
                0 < self.kv_low <= self.kv_high <= 1,
                "kv_low and kv_high must satisfy 0 < kv_low <= kv_high <= 1",
            ),
        ]:
            if not holds:
                raise UserError(message)

    @property
    def samples_needed(self) -> int:
        return self.samples_min or self.group_size


@dataclass(frozen=True, slots=True)
class Policy:
    """`cap`: the most groups untaken or taken for the step being filled; None is no extra cap."""

    max_staleness: int
    cap: int | None
    streaming: bool
    surplus_at_close: bool = False
    reversion_at_publish: bool = False
    keeps_bound: bool = True
    freshness: bool = False


def policy_of(params: Params) -> Policy:
    """The policy of this run's mode.

    >>> policy_of(Params(mode=Mode.ONE_STEP_OFF, batch_groups=8)).cap
    8
    """
    batch, staleness = params.batch_groups, params.max_staleness
    more = math.ceil(batch * params.oversample)
    return {
        Mode.SYNC: Policy(0, batch, streaming=False),
        Mode.ONE_STEP_OFF: Policy(1, batch, streaming=False),
        Mode.REPLICATION: Policy(
            0, more, streaming=False, surplus_at_close=True, keeps_bound=False
        ),
        Mode.PARTIAL: Policy(staleness, None, streaming=False, reversion_at_publish=True),
        Mode.MULTI_VERSION: Policy(
            staleness, None, streaming=params.streaming, freshness=params.freshness
        ),
    }[params.mode]
