"""What instances say of a request that moves from one to the other.

    source --exported--> controller --import--> destination --imported--> controller --move_done-->

Decides nothing: a move the core has given up in the meantime is cleaned away. Invariant: the source
keeps the request until the destination has said that it has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_rl.core import events as ev
from dora_rl.core.ledger import current
from dora_rl.io.wire import Message
from dora_rl.types import RequestId

if TYPE_CHECKING:
    from dora_rl.worlds.local import LocalRun


def on_moving(run: LocalRun, name: str, life: int, message: Message) -> None:
    body = message.body
    rid, epoch = RequestId(body["group"], body["sample"]), body["epoch"]
    if message.kind == "exported":
        request = current(run.state, rid, epoch)
        if request is not None and request.dest == body["dst"]:
            more = run.carrier.exported(body, name)
            run.pool.send(body["dst"], "import", {**body, "src": name, **more})
        else:
            run.carrier.given_up(body, name)  # by the core
    elif message.kind == "imported":
        run.pool.send(body["src"], "move_done", body)
        if run.stop is None:  # what comes after the stop is not in the log either
            run.records.totals.migrations += 1
            run.records.totals.kv_bytes_moved += body["num_bytes"]
        who, attempt = (rid, epoch, body["src"], name), body["attempt"]
        sizes = (body["num_bytes"], body["num_tokens"])
        run.handle(ev.Moved(*who, *sizes, attempt=attempt, incarnation=life))
    else:
        run.pool.send(body["src"], "move_cancel", body)
        who, attempt = (rid, epoch, body["src"], name), body["attempt"]
        run.handle(ev.MoveFailed(*who, True, body["reason"], attempt=attempt))
