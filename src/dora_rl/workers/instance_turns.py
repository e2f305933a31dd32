"""The turns of an instance's requests: asks when one ends, goes on when the answer is there.

A request between two turns holds no decode slot: it is an idle session of the engine, its KV kept
or spilled. Whoever holds a session that becomes idle asks, also after a move, a park or a restart;
an answer is applied only to an idle session at that turn, and otherwise dropped, because whoever
has the session then will ask again. So answers may come twice, late or to the wrong place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_rl.core import events as ev
from dora_rl.engine.sequence import Status
from dora_rl.envs.host import Answer
from dora_rl.io.wire import Message
from dora_rl.types import Finish, RequestId, Trajectory
from dora_rl.workers.turns import apply_answer

if TYPE_CHECKING:
    from dora_rl.workers.rollout import RolloutWorker


class InstanceTurns:
    """Asks and answers of one instance."""

    def __init__(self, worker: RolloutWorker) -> None:
        self._worker = worker

    def ended(self, trajectory: Trajectory) -> bool:
        """True if only a turn ended; the environment is asked."""
        worker, rid = self._worker, trajectory.request
        seq = worker.engine.find(rid)
        if trajectory.finish not in (Finish.STOP, Finish.LENGTH) or seq is None:
            return False
        if not seq.request.keep:
            return False
        epoch = worker.epochs.get(rid)
        if epoch is not None and seq.status is Status.IDLE and seq.turns == trajectory.turns:
            body = {"group": rid.group, "sample": rid.sample, "epoch": epoch, "turn": seq.turns}
            body["version"] = seq.version
            now = seq.trajectory()  # an output may lie here while the session is replaced
            names = ("token_ids", "loss_mask", "logprobs")
            worker.channel.send("turn", body, {name: getattr(now, name) for name in names})
        return True

    def observed(self, message: Message) -> None:
        """An answer came."""
        worker, body = self._worker, message.body
        rid, epoch = RequestId(body["group"], body["sample"]), body["epoch"]
        seq = worker.engine.find(rid)
        if worker.epochs.get(rid) != epoch or seq is None or rid in worker.exports:
            return
        if seq.status is not Status.IDLE or seq.turns != body["turn"]:
            return
        if body["error"]:
            worker.engine.abort(rid)
            del worker.epochs[rid]
            worker.say(ev.SampleFailed(rid, epoch, worker.name, body["error"]))
            return
        answer = Answer(
            tuple(message.arrays["token_ids"].tolist()),
            body["done"],
            body["cut"],
            body["reward"],
        )
        trajectory = apply_answer(worker.engine, rid, answer, worker.params)
        if trajectory is not None:
            worker.finish(trajectory, answer.reward)
