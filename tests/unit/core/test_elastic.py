"""Instances on the trainer's devices: asleep from a batch's closing to its publication."""

from __future__ import annotations

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.orchestrate import evict
from dora_rl.core.state import Phase
from tests.kit.hand_driven import Hand, only


def closing(elastic_slots: int, standalone_slots: int) -> tuple[Hand, list[act.Action]]:
    """One batch of one group is closed while others run on an elastic instance `e`."""
    hand = Hand(batch_groups=1, group_size=1, num_steps=4, max_staleness=3, inflight_groups=3)
    hand.tell(ev.Started(hand.params))
    hand.join("e", elastic_slots, elastic=True, versions=(0,))
    hand.tell(ev.LearnerJoined(0, 0))
    if standalone_slots:
        hand.join("s", standalone_slots, versions=(0,))
    first = next(iter(hand.state.instances["e"].requests)).group
    return hand, hand.complete(first)


def test_it_sleeps_when_the_batch_closes_and_parks_what_has_no_other_place() -> None:
    hand, actions = closing(elastic_slots=3, standalone_slots=0)
    assert only(actions, act.CloseStep) and only(actions, act.Sleep) == [act.Sleep("e")]
    parked = only(actions, act.Park)
    assert len(parked) == 2 and actions.index(parked[-1]) < actions.index(act.Sleep("e"))
    assert hand.state.slots_awake == 0
    assert not only(hand.tell(ev.BatchAccepted(0)), act.Dispatch), "nobody is awake"
    actions = hand.tell(ev.StepCommitted(0, "x"))
    assert only(actions, act.Wake) == [act.Wake("e")]
    assert {u.request for u in only(actions, act.Unpark)} == {p.request for p in parked}
    hand.to_the_end()
    hand.audit()


def test_what_has_room_elsewhere_moves_with_its_cache() -> None:
    hand, actions = closing(elastic_slots=3, standalone_slots=4)
    moves = only(actions, act.Move)
    assert moves and {(m.src, m.dst, m.version) for m in moves} == {("e", "s", 0)}
    assert not only(actions, act.Park)
    for move in moves:
        hand.tell(ev.Moved(move.request, move.epoch, "e", "s", 5, 5))
        assert hand.request(move.request.group).instance == "s"
    hand.to_the_end()
    hand.audit()


def test_a_parked_request_may_go_on_elsewhere_when_a_place_comes_free() -> None:
    hand, actions = closing(elastic_slots=3, standalone_slots=0)
    actions = hand.join("s", 2, versions=(0,))
    moves = only(actions, act.Move)
    assert len(moves) == 2 and {m.src for m in moves} == {"e"}
    hand.tell(ev.MoveFailed(moves[0].request, moves[0].epoch, "e", "s", True, "reset"))
    assert hand.request(moves[0].request.group).phase is not Phase.RUNNING
    hand.to_the_end()
    hand.audit()


def test_a_step_with_elastic_instances_is_fed_only_when_it_is_full() -> None:
    hand = Hand(batch_groups=2, group_size=1, num_steps=3)
    hand.begin({"e": 4}, elastic=True)
    assert not only(hand.complete(0), act.Feed)
    assert len(only(hand.complete(1), act.Feed)) == 2


def test_nothing_is_fed_ahead_to_a_learner_whose_devices_others_share() -> None:
    """The elastic instance decodes between two steps: the learner must rest then."""
    hand = Hand(batch_groups=1, group_size=1, num_steps=4, max_staleness=3)
    hand.begin({"s": 4})
    hand.join("e", 4, elastic=True, versions=(0,))
    hand.complete(0)
    hand.tell(ev.BatchAccepted(0))
    assert not only(hand.complete(1), act.Feed)
    actions = hand.tell(ev.StepCommitted(0, "x"))
    assert [(f.step, f.group) for f in only(actions, act.Feed)] == [(1, 1)]
    hand.to_the_end()
    hand.audit()


def test_one_that_joins_after_groups_were_fed_ahead_sleeps_until_the_learner_rests() -> None:
    hand = Hand(batch_groups=1, group_size=1, num_steps=4, max_staleness=3)
    hand.begin({"s": 4})
    hand.complete(0)
    hand.tell(ev.BatchAccepted(0))
    assert only(hand.complete(1), act.Feed)
    hand.join("e", 4, elastic=True, versions=(0,))
    hand.tell(ev.StepCommitted(0, "x"))
    assert not hand.state.instances["e"].awake, "step 1 is closed and trains"
    hand.tell(ev.BatchAccepted(1))
    hand.tell(ev.StepCommitted(1, "y"))
    assert hand.state.instances["e"].awake
    hand.to_the_end()
    hand.audit()


def test_one_that_joins_while_a_batch_trains_is_asleep_until_it_is_published() -> None:
    hand, _ = closing(elastic_slots=3, standalone_slots=0)
    hand.join("e2", 4, elastic=True, versions=(0,))
    assert not hand.state.instances["e2"].awake
    hand.tell(ev.BatchAccepted(0))
    hand.tell(ev.StepCommitted(0, "x"))
    assert hand.state.instances["e2"].awake
    hand.to_the_end()
    hand.audit()


def test_one_that_dies_in_its_sleep_loses_nothing() -> None:
    hand, actions = closing(elastic_slots=3, standalone_slots=0)
    parked = [p.request for p in only(actions, act.Park)]
    hand.tell(ev.InstanceLost("e", "died asleep"))
    actions = hand.join("e", 3, elastic=True, versions=(0,))
    hand.tell(ev.BatchAccepted(0))
    actions = hand.tell(ev.StepCommitted(0, "x"))
    again = {d.group for d in only(actions, act.Dispatch) if d.resume}
    assert again == {rid.group for rid in parked}
    hand.to_the_end()
    hand.audit()


def test_levelling_leaves_a_sleeping_instance_alone() -> None:
    """Its load was under way when the batch closed, and ends while it sleeps."""
    hand = Hand(
        batch_groups=1,
        group_size=1,
        num_steps=4,
        max_staleness=3,
        inflight_groups=4,
        level_running=True,
        level_slack=0.0,
    )
    hand.begin({"s": 4})
    hand.join("e", 4, elastic=True)
    hand.complete(0)
    assert not hand.state.instances["e"].awake and hand.state.instances["e"].loading == 0
    assert not only(hand.tell(ev.Loaded("e", 0)), act.Move)


def test_what_arrives_at_an_instance_that_fell_asleep_does_not_stay() -> None:
    """Levelling hands requests over to `e`; the batch closes while they are on their way."""
    hand = Hand(
        batch_groups=1,
        group_size=1,
        num_steps=4,
        max_staleness=3,
        inflight_groups=4,
        level_running=True,
        level_slack=0.0,
    )
    hand.begin({"s": 4})
    hand.join("e", 4, elastic=True)
    moves = only(hand.tell(ev.Loaded("e", 0)), act.Move)
    assert len(moves) == 2 and {m.dst for m in moves} == {"e"}
    stayed = [g.id for g in hand.running() if hand.request(g.id).phase is Phase.RUNNING]
    hand.complete(stayed[0])
    assert not hand.state.instances["e"].awake
    actions: list[act.Action] = []
    for move in moves:
        actions += hand.tell(ev.Moved(move.request, move.epoch, "s", "e", 5, 5))
    onwards = only(actions, act.Move)
    assert {(m.request, m.src, m.dst) for m in onwards} == {(m.request, "e", "s") for m in moves}
    hand.to_the_end()
    hand.audit()


def test_a_version_leaves_every_seat_when_it_retires_also_one_that_was_given_up() -> None:
    """What an instance has given up and drained keeps its seat until another version needs it."""
    hand = Hand(batch_groups=1, group_size=1, num_steps=4, max_staleness=3, inflight_groups=2)
    hand.begin({"s": 4}, resident_max=2)
    hand.join("e", 2, elastic=True, resident_max=4, versions=(0,))
    moves: list[act.Action] = []
    elastic = hand.state.instances["e"]
    evict(hand.state, elastic, 0, hand.now, moves)
    for move in only(moves, act.Move):
        hand.tell(ev.Moved(move.request, move.epoch, "e", "s", 5, 5))
    assert list(elastic.held) == [0] and not elastic.held[0].busy
    while 0 in hand.state.versions:
        hand.complete(hand.running()[0].id)
        hand.train()
        hand.settle()
    assert 0 not in elastic.held, "the seat is lost"
    hand.to_the_end()  # with every batch that closes it gives up what it holds
    hand.audit()


def test_a_version_that_is_wanted_again_where_it_was_given_up_stays() -> None:
    hand = Hand(batch_groups=1, group_size=1, num_steps=4, max_staleness=3, inflight_groups=2)
    hand.begin({"a": 2}, resident_max=2)
    evict(hand.state, hand.state.instances["a"], 0, hand.now, [])
    hand.tell(ev.Tick(), after_s=5.0)
    assert hand.state.versions[0].holders.keys() == {"a"}
    hand.to_the_end()
    hand.audit()
