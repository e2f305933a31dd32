"""Corruptions of a finished run directory: what each changes, and who must notice.

`by` is the first that objects, of `audit` (the log alone), `files` (`audit --files`) and `replay`,
even when the chain of the log was made anew, as a bug that writes a wrong log would make it.
"" is one that nobody notices then; `why` says why that is so. Without a new chain the audit notices
every change of the log.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.eventlog import Entry, replay
from dora_rl.types import Finish, Mode, RequestId, Segment

Entries = list[Entry]


@dataclass(frozen=True)
class LogCorruption:
    change: Callable[[Entries], Entries]
    by: str
    why: str = ""


@dataclass(frozen=True)
class FileCorruption:
    change: Callable[[Path], None]
    by: str = "files"
    why: str = ""


# Of the log.


def everywhere(entries: Entries, change: Callable[[Any], Any]) -> Entries:
    """Every event and every action through `change`; an action it gives None for goes."""
    found: Entries = []
    for entry in entries:
        actions = [change(action) for action in entry.actions]
        kept = [action for action in actions if action is not None]
        found.append(replace(entry, event=change(entry.event), actions=kept))
    return found


def nth_event(entries: Entries, kind: type, nth: int = 0) -> tuple[int, Any]:
    places = [place for place, entry in enumerate(entries) if isinstance(entry.event, kind)]
    return places[nth], entries[places[nth]].event


def nth_action(entries: Entries, kind: type, nth: int = 0) -> tuple[int, int, Any]:
    found = [
        (place, inner, action)
        for place, entry in enumerate(entries)
        for inner, action in enumerate(entry.actions)
        if isinstance(action, kind)
    ]
    return found[nth]


def event(kind: type, nth: int = 0, **changes: Any) -> Callable[[Entries], Entries]:
    """The nth event of a kind with other fields; a function is given the old value."""

    def change(entries: Entries) -> Entries:
        place, old = nth_event(entries, kind, nth)
        return put(entries, place, event=_changed(old, changes))

    return change


def action(kind: type, nth: int = 0, **changes: Any) -> Callable[[Entries], Entries]:
    def change(entries: Entries) -> Entries:
        place, inner, old = nth_action(entries, kind, nth)
        actions = list(entries[place].actions)
        actions[inner] = _changed(old, changes)
        return put(entries, place, actions=actions)

    return change


def without_event(kind: type, nth: int = 0) -> Callable[[Entries], Entries]:
    def change(entries: Entries) -> Entries:
        place, _ = nth_event(entries, kind, nth)
        return put(entries, place, event=ev.Tick())

    return change


def without_action(kind: type, nth: int = 0) -> Callable[[Entries], Entries]:
    def change(entries: Entries) -> Entries:
        place, inner, _ = nth_action(entries, kind, nth)
        actions = list(entries[place].actions)
        del actions[inner]
        return put(entries, place, actions=actions)

    return change


def action_again(kind: type, nth: int = 0) -> Callable[[Entries], Entries]:
    def change(entries: Entries) -> Entries:
        place, _, old = nth_action(entries, kind, nth)
        return put(entries, place, actions=[*entries[place].actions, old])

    return change


def retired_early(entries: Entries) -> Entries:
    """With the first commit goes the version that it made, which is the newest."""
    place, _ = nth_event(entries, ev.StepCommitted, 0)
    return put(entries, place, actions=[*entries[place].actions, act.RetireVersion(1)])


def put(entries: Entries, place: int, **changes: Any) -> Entries:
    return [*entries[:place], replace(entries[place], **changes), *entries[place + 1 :]]


def _changed(old: Any, changes: dict[str, Any]) -> Any:
    new = {n: v(getattr(old, n)) if callable(v) else v for n, v in changes.items()}
    return replace(old, **new)


def params(**changes: Any) -> Callable[[Entries], Entries]:
    """Other parameters in `Started`, and K and B in force as they then would be."""

    def change(entries: Entries) -> Entries:
        new = replace(entries[0].event.params, **changes)  # type: ignore[union-attr]

        def both(value: Any) -> Any:
            if isinstance(value, ev.Started):
                return replace(value, params=new)
            if isinstance(value, act.InForce):
                return replace(
                    value, max_staleness=new.max_staleness, batch_groups=new.batch_groups
                )
            return value

        return everywhere(entries, both)

    return change


def renumbered(entries: Entries) -> Entries:
    return [replace(entry, number=number) for number, entry in enumerate(entries)]


def prompts_as(name: Callable[[int], int]) -> Callable[[Entries], Entries]:
    """Every prompt under another number, wherever the log names it."""

    def change(value: Any) -> Any:
        return replace(value, prompt=name(value.prompt)) if hasattr(value, "prompt") else value

    return lambda entries: everywhere(entries, change)


def groups_from(value: Any, first: int) -> Any:
    """The same with every group from `first` on one number higher."""

    def up(group: int) -> int:
        return group + (group >= first)

    changes: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name)
        if field.name == "group":
            changes["group"] = up(old)
        elif field.name == "groups":
            changes["groups"] = tuple(map(up, old))
        elif field.name == "request":
            changes["request"] = RequestId(up(old.group), old.sample)
    return replace(value, **changes) if changes else value


def invented_failure(entries: Entries) -> Entries:
    """A group that never was, failed at once for a made-up reason; its prompt is issued again."""
    place, inner, issued = nth_action(entries, act.IssueGroup, 5)
    changed = everywhere(entries, lambda value: groups_from(value, issued.group))
    end = act.EndGroup(issued.group, issued.version, act.End.FAILED, None, "it was too long")
    actions = list(changed[place].actions)
    return put(changed, place, actions=[*actions[:inner], issued, end, *actions[inner:]])


def sample_taken_out(entries: Entries) -> Entries:
    """The last sample of a group was never dispatched, finished, scored or fed."""
    _, _, fed = nth_action(entries, act.Feed, 3)
    rid = RequestId(fed.group, fed.samples[-1])

    def change(value: Any) -> Any:
        if getattr(value, "request", None) == rid:
            return None if isinstance(value, act.Score) else ev.Tick()
        if isinstance(value, act.Dispatch) and value.group == rid.group:
            kept = [place for place, s in enumerate(value.samples) if s != rid.sample]
            samples = tuple(value.samples[place] for place in kept)
            return replace(value, samples=samples, epochs=tuple(value.epochs[p] for p in kept))
        if isinstance(value, act.Feed) and value.group == rid.group:
            return replace(value, samples=tuple(s for s in value.samples if s != rid.sample))
        return value

    return everywhere(entries, change)


def checksums_exchanged(entries: Entries) -> Entries:
    first, one = nth_event(entries, ev.StepCommitted, 0)
    second, two = nth_event(entries, ev.StepCommitted, 1)
    changed = put(entries, first, event=replace(one, checksum=two.checksum))
    return put(changed, second, event=replace(two, checksum=one.checksum))


def rewards_exchanged(entries: Entries) -> Entries:
    """Of the first two scores that differ."""
    first, one = nth_event(entries, ev.Scored, 0)
    second, two = next(
        (place, entry.event)
        for place, entry in enumerate(entries)
        if isinstance(entry.event, ev.Scored) and entry.event.reward != one.reward
    )
    changed = put(entries, first, event=replace(one, reward=two.reward))
    return put(changed, second, event=replace(two, reward=one.reward))


def segment_of_another_version(entries: Entries) -> Entries:
    def other(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
        return (Segment(0, segments[0].version + 1),)

    return event(ev.SampleFinished, 9, segments=other)(entries)


def entry_taken_out(kind: type, nth: int = 0) -> Callable[[Entries], Entries]:
    def change(entries: Entries) -> Entries:
        place, _ = nth_event(entries, kind, nth)
        return renumbered([*entries[:place], *entries[place + 1 :]])

    return change


def heart_beat_taken_out(entries: Entries) -> Entries:
    """A report or a tick that nothing followed from, then or later. Which kinds a run has depends
    on how fast it is; while its workers start there are ticks."""
    beats = (ev.LearnerReport, ev.InstanceReport, ev.Tick)
    for place in reversed(range(1, len(entries))):
        if isinstance(entries[place].event, beats) and not entries[place].actions:
            rest = renumbered([*entries[:place], *entries[place + 1 :]])
            if replay(rest).ok:
                return rest
    raise AssertionError("every heart-beat of this run mattered")


def finish_moved_before_its_dispatch(entries: Entries) -> Entries:
    place, _ = nth_event(entries, ev.SampleFinished, 4)
    moved = [*entries[:2], entries[place], *entries[2:place], *entries[place + 1 :]]
    return [replace(entry, number=n, now=entries[n].now) for n, entry in enumerate(moved)]


def cut_after(kind: type, nth: int) -> Callable[[Entries], Entries]:
    return lambda entries: entries[: nth_event(entries, kind, nth)[0] + 1]


UNREAD = "a time is measured, not decided; nothing promised depends on it"
LOG: dict[str, LogCorruption] = {
    "reward changed": LogCorruption(event(ev.Scored, 3, reward=lambda r: r + 0.5), "files"),
    "rewards of two samples exchanged": LogCorruption(rewards_exchanged, "files"),
    "reward not a number": LogCorruption(event(ev.Scored, 3, reward=float("nan")), "audit"),
    "digest of a sample changed": LogCorruption(
        event(ev.SampleFinished, 3, digest="0" * 16), "files"
    ),
    "length changed": LogCorruption(
        event(ev.SampleFinished, 3, num_tokens=lambda n: n + 1), "files"
    ),
    "end of a response changed": LogCorruption(
        event(ev.SampleFinished, 3, finish=Finish.LENGTH), "files"
    ),
    "decoded under another version": LogCorruption(segment_of_another_version, "audit"),
    "decoded under two versions": LogCorruption(
        event(ev.SampleFinished, 9, segments=lambda s: (*s, Segment(2, s[0].version + 1))), "audit"
    ),
    "finished elsewhere": LogCorruption(
        event(ev.SampleFinished, 9, instance=lambda i: f"{i}0"), "audit"
    ),
    "finished by a lost epoch": LogCorruption(event(ev.SampleFinished, 9, epoch=7), "audit"),
    "finished before its dispatch": LogCorruption(finish_moved_before_its_dispatch, "audit"),
    "never finished": LogCorruption(without_event(ev.SampleFinished, 9), "audit"),
    "never scored": LogCorruption(without_event(ev.Scored, 9), "audit"),
    "scored for another prompt": LogCorruption(
        action(act.Score, 9, prompt=lambda p: p + 1), "audit"
    ),
    "scored twice": LogCorruption(action_again(act.Score, 9), "audit"),
    "checksum of a version forged": LogCorruption(
        event(ev.StepCommitted, 0, checksum="f" * 64), "audit"
    ),
    "checksum of the last version forged": LogCorruption(
        event(ev.StepCommitted, -1, checksum="f" * 64), "files"
    ),
    "checksums of two versions exchanged": LogCorruption(checksums_exchanged, "audit"),
    "other weights loaded": LogCorruption(event(ev.Loaded, -1, checksum="f" * 64), "audit"),
    "never loaded": LogCorruption(without_event(ev.Loaded, 0), "audit"),
    "digest of the metrics changed": LogCorruption(
        event(ev.StepCommitted, 1, metrics="0" * 16), "files"
    ),
    "digest of the configuration changed": LogCorruption(
        event(ev.Started, config="0" * 16), "files"
    ),
    "K raised": LogCorruption(params(max_staleness=5), "files"),
    "K lowered": LogCorruption(params(max_staleness=0), "audit"),
    "B changed": LogCorruption(params(batch_groups=2), "audit"),
    "more steps asked for": LogCorruption(params(num_steps=9), "audit"),
    "larger groups": LogCorruption(params(group_size=5), "audit"),
    "smaller groups": LogCorruption(params(group_size=3), "audit"),
    "fewer samples needed": LogCorruption(params(samples_min=1), "files"),
    "more attempts allowed": LogCorruption(params(attempts_max=9), "files"),
    "equal rewards to be filtered": LogCorruption(params(filter_equal=True), "audit"),
    "mode sync": LogCorruption(params(mode=Mode.SYNC), "audit"),
    "mode partial": LogCorruption(params(mode=Mode.PARTIAL), "files"),
    "no K and B in force": LogCorruption(without_action(act.InForce), "audit"),
    "prompts exchanged": LogCorruption(prompts_as(lambda p: {2: 3, 3: 2}.get(p, p)), "audit"),
    "prompt skipped": LogCorruption(prompts_as(lambda p: p + (p >= 4)), "audit"),
    "prompt used twice": LogCorruption(prompts_as(lambda p: p - (p >= 4)), "audit"),
    "another prompt dispatched": LogCorruption(
        action(act.Dispatch, 4, prompt=lambda p: p + 1), "audit"
    ),
    "failure invented": LogCorruption(invented_failure, "audit"),
    "sample taken out of a group": LogCorruption(sample_taken_out, "audit"),
    "sample left out of the feed": LogCorruption(
        action(act.Feed, 3, samples=lambda s: s[:-1]), "audit"
    ),
    "sample fed twice": LogCorruption(action(act.Feed, 3, samples=lambda s: (*s, s[0])), "audit"),
    "group fed as another version": LogCorruption(
        action(act.Feed, 3, version=lambda v: v + 1), "audit"
    ),
    "group fed twice": LogCorruption(action_again(act.Feed, 3), "audit"),
    "group never fed": LogCorruption(without_action(act.Feed, 3), "audit"),
    "group ended twice": LogCorruption(action_again(act.EndGroup, 3), "audit"),
    "group never ended": LogCorruption(without_action(act.EndGroup, 3), "audit"),
    "group dropped as surplus": LogCorruption(
        action(act.EndGroup, 3, end=act.End.SURPLUS, step=None, reason="too long"), "audit"
    ),
    "group trained by another step": LogCorruption(action(act.EndGroup, 3, step=2), "audit"),
    "group issued twice": LogCorruption(action_again(act.IssueGroup, 3), "audit"),
    "group number skipped": LogCorruption(
        lambda entries: everywhere(entries, lambda value: groups_from(value, 5)), "audit"
    ),
    "issued on a version to come": LogCorruption(action(act.IssueGroup, 3, version=1), "audit"),
    "dispatched under another version": LogCorruption(action(act.Dispatch, 3, version=1), "audit"),
    "dispatched twice": LogCorruption(action_again(act.Dispatch, 3), "audit"),
    "batch one short": LogCorruption(action(act.CloseStep, 1, groups=lambda g: g[:-1]), "audit"),
    "batch in another order": LogCorruption(
        action(act.CloseStep, 1, groups=lambda g: g[::-1]), "audit"
    ),
    "step closed twice": LogCorruption(action_again(act.CloseStep, 1), "replay"),
    "step committed by nobody": LogCorruption(without_event(ev.StepCommitted, 1), "audit"),
    "version retired early": LogCorruption(retired_early, "audit"),
    "learner of another version": LogCorruption(event(ev.LearnerJoined, version=3), "audit"),
    "fewer slots than requests": LogCorruption(event(ev.InstanceJoined, slots_max=1), "audit"),
    "more slots than there are": LogCorruption(event(ev.InstanceJoined, slots_max=99), "replay"),
    "log begins later": LogCorruption(lambda entries: entries[1:], "audit"),
    "log cut after a step": LogCorruption(cut_after(ev.StepCommitted, 1), "audit"),
    "log cut before its last entry": LogCorruption(lambda entries: entries[:-1], "audit"),
    "log emptied": LogCorruption(lambda entries: [], "audit"),
    "stop not that of a finished run": LogCorruption(action(act.Stop, done=False), "audit"),
    "stop for another reason": LogCorruption(action(act.Stop, reason="enough"), "files"),
    "entry of a finished sample taken out": LogCorruption(
        entry_taken_out(ev.SampleFinished, 5), "audit"
    ),
    "entry of a commit taken out": LogCorruption(entry_taken_out(ev.StepCommitted, 1), "audit"),
    "heart-beat taken out": LogCorruption(
        heart_beat_taken_out, "", "a report that nothing followed from says nothing about the run"
    ),
    "all times doubled": LogCorruption(
        lambda entries: [replace(entry, now=entry.now * 2) for entry in entries], "", UNREAD
    ),
}


# Of the other files.


def in_json(name: str, **changes: Any) -> Callable[[Path], None]:
    """Other values in a file of JSON; `a__b` is the key b of a."""

    def change(run: Path) -> None:
        document = json.loads((run / name).read_text())
        for key, value in changes.items():
            *path, last = key.split("__")
            inner = document
            for part in path:
                inner = inner[part]
            inner[last] = value
        (run / name).write_text(json.dumps(document, indent=1) + "\n")

    return change


def in_line(name: str, place: int, **changes: Any) -> Callable[[Path], None]:
    """Other values in one line of a file of JSON lines."""

    def change(run: Path) -> None:
        lines = (run / name).read_text().splitlines()
        lines[place] = json.dumps(_of(json.loads(lines[place]), changes))
        (run / name).write_text("\n".join(lines) + "\n")

    return change


def _of(line: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    new = {k.replace("__", "/"): v for k, v in changes.items()}
    return line | {k: v(line[k]) if callable(v) else v for k, v in new.items()}


def lines(name: str, change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        changed = change((run / name).read_text().splitlines(keepends=True))
        (run / name).write_text("".join(changed))

    return apply


def flipped(name: str, at: float = 0.9) -> Callable[[Path], None]:
    """One bit of one byte; `at` is its place in the file."""

    def change(run: Path) -> None:
        path = run / name
        path.chmod(0o644)
        data = bytearray(path.read_bytes())
        data[int(len(data) * at)] ^= 1
        path.write_bytes(bytes(data))

    return change


def copied(source: str, target: str) -> Callable[[Path], None]:
    """One file or directory put into the place of another."""

    def change(run: Path) -> None:
        if (run / source).is_dir():
            shutil.rmtree(run / target)
            shutil.copytree(run / source, run / target)
        else:
            shutil.copy(run / source, run / target)

    return change


def removed(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def written(name: str, text: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / name).write_text(text)

    return change


def without_key(name: str, key: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        document = json.loads((run / name).read_text())
        del document[key]
        (run / name).write_text(json.dumps(document))

    return change


def masters_flipped(run: Path) -> None:
    (path,) = (run / "learner" / "masters").glob("*/model.safetensors")
    flipped(str(path.relative_to(run)))(run)


def samples_exchanged(run: Path) -> None:
    """The responses of two samples of one group under each other's number."""
    path = run / "rollouts.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    other = next(
        place
        for place, line in enumerate(found)
        if line["group"] == found[0]["group"] and line["token_ids"] != found[0]["token_ids"]
    )
    found[0]["sample"], found[other]["sample"] = found[other]["sample"], found[0]["sample"]
    found[0]["reward"], found[other]["reward"] = found[other]["reward"], found[0]["reward"]
    path.write_text("".join(json.dumps(line) + "\n" for line in found))


def _near(values: list[float]) -> list[float]:
    return [*values[:-1], values[-1] - 0.01]


FILES: dict[str, FileCorruption] = {
    "config: learning rate": FileCorruption(in_json("config.json", trainer__lr=1e-3)),
    "config: K": FileCorruption(in_json("config.json", orchestration__max_staleness=1)),
    "config: gone": FileCorruption(removed("config.json")),
    "data: another fingerprint": FileCorruption(in_json("data.json", fingerprint="0")),
    "rollouts: token": FileCorruption(
        in_line("rollouts.jsonl", 5, token_ids=lambda ids: [ids[0] + 1, *ids[1:]])
    ),
    "rollouts: log-prob": FileCorruption(in_line("rollouts.jsonl", 5, logprobs=_near)),
    "rollouts: sum of log-probs": FileCorruption(in_line("rollouts.jsonl", 5, logprob_sum=-99.0)),
    "rollouts: reward": FileCorruption(in_line("rollouts.jsonl", 5, reward=lambda r: 1 - r)),
    "rollouts: version": FileCorruption(in_line("rollouts.jsonl", 5, version=lambda v: v + 1)),
    "rollouts: step": FileCorruption(in_line("rollouts.jsonl", 5, step=lambda s: s + 1)),
    "rollouts: text": FileCorruption(in_line("rollouts.jsonl", 5, text="another")),
    "rollouts: prompt": FileCorruption(in_line("rollouts.jsonl", 5, prompt="another")),
    "rollouts: turns": FileCorruption(
        in_line("rollouts.jsonl", 5, turns=lambda t: [[0, 1, 0], [1, t[-1][1], 1]])
    ),
    "rollouts: two samples exchanged": FileCorruption(samples_exchanged),
    "rollouts: line removed": FileCorruption(
        lines("rollouts.jsonl", lambda all: all[:3] + all[4:])
    ),
    "rollouts: line twice": FileCorruption(lines("rollouts.jsonl", lambda all: all[:3] + all[2:])),
    "rollouts: cut in a line": FileCorruption(
        lines("rollouts.jsonl", lambda all: [*all[:-1], all[-1][:40]])
    ),
    "rollouts: gone": FileCorruption(removed("rollouts.jsonl")),
    "rollouts: parts of a reward": FileCorruption(
        in_line("rollouts.jsonl", 5, parts={"mine": 0.25}),
        by="",
        why="what each of several functions gave is not in the log; their result is",
    ),
    "metrics: reward": FileCorruption(in_line("metrics.jsonl", 1, reward__mean=0.99)),
    "metrics: loss": FileCorruption(in_line("metrics.jsonl", 1, loss=0.0)),
    "metrics: step removed": FileCorruption(lines("metrics.jsonl", lambda all: [all[0], *all[2:]])),
    "metrics: step twice": FileCorruption(lines("metrics.jsonl", lambda all: [*all, all[-1]])),
    "metrics: evaluation": FileCorruption(
        lines("metrics.jsonl", lambda all: [*all, '{"version": 1, "eval/sampled": 1.0}\n']),
    ),
    "summary: last reward": FileCorruption(in_json("summary.json", reward_last=0.99)),
    "summary: steps": FileCorruption(in_json("summary.json", steps=99)),
    "summary: staleness": FileCorruption(in_json("summary.json", staleness_mean=0.0)),
    "summary: tokens": FileCorruption(in_json("summary.json", tokens_trained=1)),
    "summary: discarded tokens": FileCorruption(in_json("summary.json", discarded_tokens=9)),
    "summary: updates": FileCorruption(in_json("summary.json", updates_applied=9)),
    "summary: updates left out": FileCorruption(in_json("summary.json", updates_skipped=1)),
    "summary: mismatched": FileCorruption(in_json("summary.json", samples_mismatched=1)),
    "summary: migrations": FileCorruption(in_json("summary.json", migrations=99)),
    "summary: set aside": FileCorruption(
        in_json("summary.json", set_aside=[{"prompt": 1, "reason": "bad"}])
    ),
    "summary: evaluation": FileCorruption(in_json("summary.json", eval_last={"greedy": 1.0})),
    "summary: best": FileCorruption(
        in_json("summary.json", best={"version": 1, "metric": "greedy", "value": 1.0})
    ),
    "summary: a figure gone": FileCorruption(without_key("summary.json", "staleness_max")),
    "summary: a list": FileCorruption(written("summary.json", "[]")),
    "summary: gone": FileCorruption(removed("summary.json")),
    "config: a list": FileCorruption(written("config.json", "[]")),
    "data: gone": FileCorruption(removed("data.json")),
    "data: empty": FileCorruption(written("data.json", "{}")),
    "rollouts: a list": FileCorruption(lines("rollouts.jsonl", lambda all: ["[1,2]\n", *all[1:]])),
    "rollouts: a step alone": FileCorruption(
        lines("rollouts.jsonl", lambda all: ['{"step":1}\n', *all[1:]])
    ),
    "metrics: a step alone": FileCorruption(
        lines("metrics.jsonl", lambda all: ['{"step":0}\n', *all[1:]])
    ),
    "metrics: a list": FileCorruption(lines("metrics.jsonl", lambda all: ["[1]\n", *all[1:]])),
    "summary: speed": FileCorruption(in_json("summary.json", tokens_per_s=1e6), by="", why=UNREAD),
    "table: gone": FileCorruption(removed("table.log")),
    "table: flipped bit": FileCorruption(flipped("table.log", 0.5)),
    "weights: flipped bit": FileCorruption(flipped("weights/00000003/model.safetensors")),
    "weights: canary changed": FileCorruption(
        in_json("weights/00000003/manifest.json", manifest__canary=None)
    ),
    "weights: version under another number": FileCorruption(
        copied("weights/00000002", "weights/00000003")
    ),
    "checkpoint: model of another step": FileCorruption(
        copied(
            "checkpoints/step_000001/model.safetensors", "checkpoints/step_000002/model.safetensors"
        )
    ),
    "checkpoint: all of another step": FileCorruption(
        copied("checkpoints/step_000001", "checkpoints/step_000002")
    ),
    "checkpoint: flipped bit": FileCorruption(flipped("checkpoints/step_000002/model.safetensors")),
    "checkpoint: step": FileCorruption(
        in_json("checkpoints/step_000002/trainer/state.json", next_step=2)
    ),
    "checkpoint: optimizer": FileCorruption(
        flipped("checkpoints/step_000002/trainer/optimizer.safetensors")
    ),
    "checkpoint: random numbers": FileCorruption(
        removed("checkpoints/step_000002/trainer/rng.safetensors")
    ),
    "checkpoint: tokenizer": FileCorruption(flipped("checkpoints/step_000002/tokenizer.json", 0.5)),
    "checkpoint: no digests": FileCorruption(
        without_key("checkpoints/step_000002/trainer/state.json", "files")
    ),
    "checkpoint: no step": FileCorruption(
        without_key("checkpoints/step_000002/trainer/state.json", "next_step")
    ),
    "checkpoint: no state": FileCorruption(
        written("checkpoints/step_000002/trainer/state.json", "x")
    ),
    "learner: masters": FileCorruption(masters_flipped),
}
