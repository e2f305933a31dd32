"""One event causes a limited number of actions; what is left over is done by the next ones."""

from __future__ import annotations

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.orchestrate import shares
from dora_rl.core.state import Phase
from dora_rl.types import Mode
from tests.kit.hand_driven import Hand, only

NUM_INSTANCES, SLOTS, BATCH = 24, 2, 8
LIMIT = 8


def run_of(limit: int, seats: int, **params: object) -> Hand:
    hand = Hand(
        batch_groups=BATCH,
        group_size=2,
        num_steps=8,
        max_staleness=3,
        event_actions_max=limit,
        rebalance_min_s=1.0,
        level_running=True,
        level_slack=0.0,
        **params,
    )
    names = {f"i{n}": SLOTS for n in range(NUM_INSTANCES)}
    hand.begin(names, resident_max=seats)
    return hand


def train_some(hand: Hand, num_steps: int) -> None:
    """Finish what runs, in the order of issue, and let time pass between steps."""
    while hand.state.committed < num_steps:
        for group in [g for g in hand.running() if g.version == min(hand.state.versions)]:
            if all(r.phase is Phase.RUNNING for r in group.requests):
                hand.complete(group.id)
        rest(hand)
        batch = hand.state.batches.get(hand.state.committed)
        if batch is not None and batch.close_sent:
            hand.train()
        rest(hand)


def rest(hand: Hand) -> None:
    """Time passes until everything that was left over is done."""
    for _ in range(12):
        hand.tell(ev.Tick(), after_s=1.0)
        hand.settle()
        for name in list(hand.state.instances):
            hand.tell(ev.InstanceReport(name, 0, 0))


def test_no_event_causes_more_than_its_share() -> None:
    for seats in (1, 2):
        hand = run_of(LIMIT, seats)
        train_some(hand, 3)
        # A flip is begun while there is room, with all its requests; the groups of a step end
        # together with it.
        most = LIMIT + SLOTS + 2
        for entry in hand.entries:
            own = only(entry.actions, act.EndGroup)
            assert len(entry.actions) - len(own) <= most, (type(entry.event), len(entry.actions))
        assert max(len(e.actions) for e in hand.entries) > LIMIT / 2, "the limit was met"
        hand.to_the_end()
        hand.audit()


def test_what_is_left_over_comes_to_the_partition_that_fits() -> None:
    for limit in (LIMIT, 10**6):
        hand = run_of(limit, seats=1)
        train_some(hand, 2)
        demand = {v: live.num_active for v, live in hand.state.versions.items() if live.num_active}
        assert len(demand) > 1
        for version, share in shares(demand, NUM_INSTANCES).items():
            count = len(hand.state.versions[version].holders)
            assert abs(count - share) <= 1, (limit, version, count, share)


def test_a_large_fleet_is_looked_at_by_one_event_and_divided_by_the_next() -> None:
    """To look at all instances is an event's whole share; what follows is the next one's."""
    hand = run_of(limit=2, seats=1)
    train_some(hand, 2)
    divided_later = 0
    for _ in range(40):
        hand.tell(ev.Tick(), after_s=1.0)
        if hand.state.partition_due:
            divided_later += 1
            assert not hand.state.flips, "the event that looked has also divided"
            hand.tell(ev.Tick())
            assert not hand.state.partition_due
        hand.settle()
        for name in list(hand.state.instances):
            hand.tell(ev.InstanceReport(name, 0, 0))
    assert divided_later, "no rebalance had to wait"
    demand = {v: live.num_active for v, live in hand.state.versions.items() if live.num_active}
    for version, share in shares(demand, NUM_INSTANCES).items():
        assert abs(len(hand.state.versions[version].holders) - share) <= 1
    hand.to_the_end()
    hand.audit()


def test_a_batch_is_closed_when_all_its_groups_are_fed() -> None:
    hand = Hand(batch_groups=9, group_size=1, num_steps=2, mode=Mode.SYNC, event_actions_max=2)
    hand.begin({"a": 16})
    while len(hand.state.groups) < 9:
        hand.tell(ev.Tick(), after_s=0.1)
    fed: list[int] = []
    closed: list[act.CloseStep] = []
    while not closed:
        actions = hand.tell(ev.Tick(), after_s=0.1)
        for request in [r for g in hand.running() for r in g.requests]:
            if request.phase is Phase.RUNNING:
                actions += hand.complete(request.id.group)
        fed += [feed.group for feed in only(actions, act.Feed)]
        closed += only(actions, act.CloseStep)
    assert len(fed) == 9 and closed[0].groups == tuple(fed)


def test_met_deadlines_are_forgotten_a_few_at_a_time_and_open_ones_kept() -> None:
    hand = Hand(batch_groups=4, group_size=1, num_steps=400, inflight_groups=8)
    hand.begin({"a": 8})
    sizes: list[int] = []
    for _ in range(390):
        for group in hand.running()[:4]:
            hand.complete(group.id)
        hand.train()
        hand.tell(ev.Tick(), after_s=0.01)
        state = hand.state
        sizes.append(len(state.deadlines) + len(state.old_deadlines))
    assert max(sizes) < 1_500, "they pile up"
    hand.finish(hand.running()[0].id)  # its score never comes
    waiting = hand.running()[0].id
    for _ in range(70):
        hand.tell(ev.InstanceReport("a", 0, 0), after_s=1.0)
        if only(hand.tell(ev.Tick()), act.Score):
            break
    assert hand.request(waiting).score_attempts == 1
