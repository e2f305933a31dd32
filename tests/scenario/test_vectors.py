"""The two worked examples of LongCat-Flash-Thinking, through `core.step` with real events.

Figure 6 is one load-balancing action; figure 5 is two consecutive steps with elastic instances.
Our rules differ from the paper's where it discards; the vectors say what must hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.state import Phase
from dora_rl.observe.audit import audit
from tests.kit.hand_driven import Hand, only

VECTORS = Path(__file__).parent.parent / "vectors"


def vector(name: str) -> dict[str, Any]:
    return json.loads((VECTORS / name).read_text())


def group_on(hand: Hand, name: str, nth: int = 0) -> int:
    """The nth group that runs on an instance, in the order it came there."""
    return list(hand.state.instances[name].requests)[nth].group


def lose_x(hand: Hand) -> list[act.Action]:
    """The instance `X` dies. Groups without attempts left fail and their prompts are issued again.

    This makes room for several new groups in one event.
    """
    return hand.tell(ev.InstanceLost("X", "left"))


class Figure6:
    """D0 and D2 hold version 0, D1 and D3 version 1; three slots are free; three prompts wait."""

    def __init__(self) -> None:
        hand = self.hand = Hand(
            batch_groups=1,
            group_size=1,
            num_steps=40,
            max_staleness=20,  # the bound is not what this figure is about
            inflight_groups=8,
            attempts_max=1,
        )
        hand.begin({"D0": 2, "D2": 2})
        hand.complete(group_on(hand, "D0"))
        hand.train()  # version 1 is the newest from here on
        hand.join("D1", 2, versions=(1,))
        hand.join("D3", 2, versions=(1,))
        hand.join("X", 100, versions=(1,))
        one, two = group_on(hand, "D0", 0), group_on(hand, "D0", 1)
        three, four = group_on(hand, "D2", 0), group_on(hand, "D2", 1)
        five, six = group_on(hand, "D1", 0), group_on(hand, "D1", 1)
        seven, eight = group_on(hand, "D3", 0), group_on(hand, "D3", 1)
        for finished in (one, three, five):
            hand.complete(finished)  # each makes room in flight for a group on X
        self.paper = {2: two, 4: four, 6: six, 7: seven, 8: eight}

    def running(self) -> dict[str, list[int]]:
        instances = self.hand.state.instances.values()
        return {i.id: sorted(r.group for r in i.requests) for i in instances}

    def versions(self) -> dict[str, int]:
        """The version each instance holds (each has one seat)."""
        return {i.id: next(iter(i.held)) for i in self.hand.state.instances.values()}


def test_figure_6_is_one_load_balancing_action() -> None:
    facts = vector("lcft_fig6.json")
    figure = Figure6()
    hand, paper = figure.hand, figure.paper
    before = {n: (d["version"], d["running"]) for n, d in facts["before"].items()}
    for name, (version, running) in before.items():
        assert figure.versions()[name] == version
        assert figure.running()[name] == sorted(paper[r] for r in running)

    actions = lose_x(hand)
    issued = only(actions, act.IssueGroup)
    moves = only(actions, act.Move)
    for move in moves:
        actions += hand.tell(ev.Moved(move.request, move.epoch, move.src, move.dst, 1, 1))
    actions += hand.load_all()

    expected = facts["expected"]
    assert len(issued) == len(facts["new_prompts"])
    assert sum(i.version == 0 for i in issued) == expected["new_prompts_on_version_0"]
    partition: dict[str, int] = {}
    for version in figure.versions().values():
        partition[str(version)] = partition.get(str(version), 0) + 1
    assert partition == expected["partition"]
    for wanted in expected["kv_moves_at_least"]:
        (move,) = [m for m in moves if m.request.group == paper[wanted["request"]]]
        assert move.version == wanted["to_version"]
        assert figure.versions()[move.dst] == wanted["to_version"]
    counts = {len(groups) for groups in figure.running().values()}
    assert counts == {expected["running_per_instance"]}
    assert len(only(actions, act.Load)) == 1, "no more than one instance changes its version"
    hand.to_the_end()
    hand.audit()


class Figure5:
    """Eight one-slot instances; versions n-2, n-1, n of the paper are 0, 1, 2 here."""

    def __init__(self, facts: dict[str, Any]) -> None:
        hand = self.hand = Hand(
            batch_groups=facts["batch"],
            group_size=1,
            num_steps=6,
            max_staleness=facts["max_staleness"],
            inflight_groups=10,
            attempts_max=2,
            fill_older_max=4,
        )
        hand.tell(ev.Started(hand.params))
        hand.tell(ev.LearnerJoined(0, 0))
        for name in ("S0", "S1", "E3"):
            hand.join(name, 1, versions=(0,))
        hand.join("X", 5, versions=(0,), resident_max=3)
        self.one_step_on_x()
        for name in ("S2", "S3"):
            hand.join(name, 1, versions=(1,))
            hand.complete(group_on(hand, "X"))  # its place is taken on this instance
        hand.load_all()
        self.one_step_on_x()
        lose_x(hand)
        hand.join("X", 5, versions=(1,))
        lose_x(hand)
        hand.join("E3", 1, versions=(0,), elastic=True)  # goes on with its request
        for name in ("E0", "E1", "E2"):
            hand.join(name, 1, versions=(2,), elastic=True)
        self.paper = {prompt: group_on(hand, slot) for slot, (prompt, _) in facts["start"].items()}

    def one_step_on_x(self) -> None:
        """Short groups on X fill the step being filled; everything else goes on running."""
        hand = self.hand
        step = hand.state.filling
        while not hand.state.batch.closed:
            hand.complete(group_on(hand, "X"))
        assert hand.state.filling == step
        hand.train()
        hand.load_all()


def issued_by(actions: list[act.Action]) -> list[act.IssueGroup]:
    return only(actions, act.IssueGroup)


def test_figure_5_waits_where_the_paper_discards() -> None:
    facts = vector("lcft_fig5.json")
    figure = Figure5(facts)
    hand, paper = figure.hand, figure.paper
    oldest = 2  # the paper counts versions from the first step's policy
    for slot, (prompt, version) in facts["start"].items():
        group = hand.state.groups[paper[prompt]]
        assert group.version == version + oldest and group.requests[0].instance == slot
    assert (hand.state.filling, hand.state.newest) == (2, 2)

    wanted = facts["assert_only"]
    refill = {entry["slot_of"]: entry for entry in facts["step_1"]["refill"]}
    for prompt in facts["step_1"]["completion_order"]:
        actions = hand.complete(paper[prompt]) + hand.load_all()
        entry = refill.get(prompt)
        if entry is None:
            continue
        (issued,) = issued_by(actions)
        paper[entry["prompt"]] = issued.group
        if entry["prompt"] in wanted["refused_on_the_old_version"]:
            assert issued.version == hand.state.newest, "dispatched on the newest one instead"
    (closed,) = [a for e in hand.entries for a in only(e.actions, act.CloseStep) if a.step == 2]
    assert set(closed.groups) == {paper[prompt] for prompt in wanted["first_batch"]}
    assert {10, 12} <= set(paper) and not {paper[10], paper[12]} & set(hand.state.batch.groups)

    sleeping = {i.id for i in hand.state.instances.values() if not i.awake}
    assert sleeping == {"E0", "E1", "E2", "E3"}, "elastic instances train"
    hand.train()
    assert all(i.awake for i in hand.state.instances.values())

    # The second step: what the paper refills on version n-1 goes to the newest version too.
    second = {entry["slot_of"]: entry for entry in facts["step_2"]["refill"]}
    hand.load_all()
    for move in [r for g in hand.state.groups.values() for r in g.requests]:
        if move.phase is Phase.MOVING and move.instance and move.dest:
            hand.tell(ev.Moved(move.id, move.epoch, move.instance, move.dest, 1, 1))
    for prompt in (11, 4):
        assert hand.state.groups[paper[prompt]].version == 1 == hand.state.filling - 2
        (issued,) = issued_by(hand.complete(paper[prompt]) + hand.load_all())
        assert second[prompt]["prompt"] in wanted["refused_on_the_old_version"]
        assert issued.version == hand.state.newest == 3
    hand.to_the_end()

    report = audit(hand.entries)
    assert report.ok, [str(f) for f in report.findings]
    assert report.figures.staleness_max == wanted["staleness_max"]
    assert report.figures.groups_outstanding == 0
    trained = {a.group for e in hand.entries for a in only(e.actions, act.EndGroup) if a.step}
    assert wanted["all_prompts_end"] and set(paper.values()) <= trained
    for entry in hand.entries:
        for issued in issued_by(entry.actions):
            late = issued.version + facts["max_staleness"] <= issued.step
            assert not late or issued.version == newest_at(hand, entry.number)


def newest_at(hand: Hand, number: int) -> int:
    commits = {
        e.event.step for e in hand.entries[: number + 1] if isinstance(e.event, ev.StepCommitted)
    }
    return len(commits)
