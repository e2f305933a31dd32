"""Who waits for whom, since what: the watchdog's words, read from the state on demand."""

from __future__ import annotations

from dataclasses import dataclass

from dora_rl.core.state import GroupPhase, Phase, State


@dataclass(frozen=True, slots=True)
class Wait:
    who: str
    what: str


def waits(state: State) -> list[Wait]:
    """Every wait the run is in now, the trainer's first. O(what is alive)."""
    found: list[Wait] = []
    found.extend(_trainer_waits(state))
    for inst in state.instances.values():
        if inst.loading is not None:
            source = inst.donor or "the store"
            found.append(Wait(inst.id, f"version {inst.loading} from {source}"))
        if not inst.awake:
            found.append(Wait(inst.id, "the trainer to publish (asleep)"))
    for live in state.versions.values():
        if live.isolation is not None:
            who = f"requests of version {live.version}"
            found.append(Wait(who, f"a suspect that is tried alone on {live.isolation}"))
        if live.num_pending:
            where = f"{len(live.holders)} holding it, {len(live.coming)} loading it"
            found.append(
                Wait(f"{live.num_pending} requests", f"a slot on version {live.version} ({where})")
            )
    return found


def _trainer_waits(state: State) -> list[Wait]:
    if not state.trainer.alive:
        return [Wait("controller", "a learner to join")]
    if state.durable < state.committed >= state.params.num_steps:
        return [Wait("the end of the run", f"version {state.committed} to be on disk")]
    batch = state.batch
    if batch.closed:
        return [Wait(f"step {batch.step}", f"the learner to finish step {state.committed}")]
    missing = state.params.batch_groups - len(batch.groups)
    phases = dict.fromkeys(GroupPhase, 0)
    scoring = 0
    for group in state.groups.values():
        phases[group.phase] += 1
        scoring += any(r.phase is Phase.SCORING for r in group.requests)
    running = phases[GroupPhase.RUNNING] + phases[GroupPhase.ISSUED]
    text = f"{missing} more groups ({running} generating, {scoring} with rewards outstanding)"
    if state.waiting_for:
        oldest = ", ".join(map(str, state.waiting_for[:5]))
        text += f"; older groups come first: {oldest}"
    return [Wait(f"step {batch.step}", text)]
