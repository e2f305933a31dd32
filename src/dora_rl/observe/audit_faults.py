"""The auditor of what is set aside: no prompt is given up without its evidence in the log.

Counts for itself, from events and actions alone: the failed groups of each prompt, and for each
request the losses of an instance on which nothing else ran. A request that went on with more tokens
than before starts from zero.
"""

from __future__ import annotations

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.audit_books import Books
from dora_rl.observe.audit_places import PlaceAudit
from dora_rl.observe.audit_report import Notebook, Promise
from dora_rl.types import GroupId, InstanceId, RequestId


class FaultAudit:
    """Every prompt that is set aside had its attempts, and is not issued again."""

    def __init__(self, books: Books, notes: Notebook, places: PlaceAudit) -> None:
        self.books = books
        self.notes = notes
        self.places = places
        self.set_aside: dict[int, str] = {}
        self.failures: dict[int, int] = {}  # failed groups of prompts that are not settled
        self.last_failed: dict[int, GroupId] = {}
        self.alone = books.alone
        self.kept: dict[RequestId, int] = {}

    # Before `places` forgets who was there.

    def on_joined(self, event: ev.InstanceJoined) -> None:
        known = self.places.instances.get(event.instance)
        if known is not None and known.life != event.life:
            self._lost(event.instance)

    def on_lost(self, event: ev.InstanceLost | act.Restart) -> None:
        self._lost(event.instance)

    def _lost(self, name: InstanceId) -> None:
        instance = self.places.instances.get(name)
        if instance is None:
            return
        at_work = [r for r, place in instance.requests.items() if not place.parked]
        if len(at_work) == 1:
            self.alone[at_work[0]] = self.alone.get(at_work[0], 0) + 1

    def on_continued(self, event: ev.Continued) -> None:
        known = event.request.group in self.books.live
        if known and event.num_tokens > self.kept.get(event.request, 0):
            self.kept[event.request] = event.num_tokens
            self.alone.pop(event.request, None)

    # Before `groups` forgets the group.

    def on_issue(self, action: act.IssueGroup) -> None:
        if action.prompt in self.set_aside:
            self._add(action.prompt, f"issued as group {action.group} after it was set aside")

    def on_end(self, action: act.EndGroup) -> None:
        record = self.books.live.get(action.group)
        if record is None:
            return
        if action.end is act.End.FAILED:
            self.failures[record.prompt] = self.failures.get(record.prompt, 0) + 1
            self.last_failed[record.prompt] = action.group
        elif action.end is not act.End.LOST:  # its prompt comes again, with what it has against it
            self.failures.pop(record.prompt, None)
            self.last_failed.pop(record.prompt, None)
        for sample in range(len(record.samples)):
            request = RequestId(action.group, sample)
            self.kept.pop(request, None)
            if action.end is not act.End.FAILED:
                self.alone.pop(request, None)

    def on_set_aside(self, action: act.SetAside) -> None:
        params, prompt = self.books.params, action.prompt
        if self.last_failed.get(prompt) != action.group:
            self._add(prompt, f"set aside for group {action.group}, which did not fail last")
        if prompt in self.set_aside:
            self._add(prompt, "set aside twice")
        failures = self.failures.pop(prompt, 0)
        if failures != action.failures:
            self._add(prompt, f"{failures} of its groups failed, not {action.failures}")
        samples = range(params.group_size)
        losses = [self.alone.pop(RequestId(action.group, s), 0) for s in samples]
        if action.kills and max(losses) < params.attempts_max:
            text = f"set aside after {max(losses)} lost instances that it had alone"
            self._add(prompt, f"{text}, {params.attempts_max} are needed")
        if not action.kills and not 0 < params.group_failures_max <= failures:
            text = f"set aside after {failures} failed groups"
            self._add(prompt, f"{text}, {params.group_failures_max} are needed")
        if not action.reason:
            self._add(prompt, "set aside without a reason")
        self.set_aside[prompt] = action.reason
        self.last_failed.pop(prompt, None)

    def _add(self, prompt: int, message: str) -> None:
        self.notes.add(Promise.C2, f"prompt {prompt}", message)
