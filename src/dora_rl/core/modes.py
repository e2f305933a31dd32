"""The five paradigms as small policies over the same core.

A policy only answers questions; the core's handlers are the same for all of them.

    sync           K = 0, train when the batch is full
    one_step_off   K = 1, one batch at a time, train when the batch is full
    partial        K as set, running requests move to each new version (C1 is given up)
    replication    K = 0, issue more than needed, end the slow rest as surplus (C2 is given up)
    multi_version  K as set, a trajectory stays on the version it began with
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dora_rl.core.params import Params
from dora_rl.types import Mode


@dataclass(frozen=True, slots=True)
class Policy:
    """`cap`: the most groups untaken or taken for the step being filled; None is no extra cap."""

    max_staleness: int
    cap: int | None
    streaming: bool
    surplus_at_close: bool = False
    reversion_at_publish: bool = False
    keeps_bound: bool = True


def policy_of(params: Params) -> Policy:
    """The policy of this run's mode.

    >>> policy_of(Params(mode=Mode.ONE_STEP_OFF, batch_groups=8)).cap
    8
    """
    batch = params.batch_groups
    match params.mode:
        case Mode.SYNC:
            return Policy(max_staleness=0, cap=batch, streaming=False)
        case Mode.ONE_STEP_OFF:
            return Policy(max_staleness=1, cap=batch, streaming=False)
        case Mode.REPLICATION:
            cap = math.ceil(batch * params.oversample)
            return Policy(0, cap, streaming=False, surplus_at_close=True, keeps_bound=False)
        case Mode.PARTIAL:
            return Policy(params.max_staleness, None, streaming=False, reversion_at_publish=True)
        case Mode.MULTI_VERSION:
            return Policy(params.max_staleness, None, streaming=params.streaming)
