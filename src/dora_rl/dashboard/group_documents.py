"""The list of groups, one group, and one trajectory with its tokens, as plain JSON values.

Text is in rollouts.jsonl once its group was trained; before that, and for a while for groups that
were not, in the table. Lengths, rewards and places the log always tells. Token texts need the
model's tokenizer; without one a token is shown by its id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dora_rl.dashboard.documents import STATES, states
from dora_rl.dashboard.run_files import RunFiles
from dora_rl.observe.history import History
from dora_rl.observe.history_rows import FINISHES
from dora_rl.observe.placements import Why
from dora_rl.store.table import peek
from dora_rl.types import RequestId, UserError

PAGE_MAX = 200
ORDERS = ("newest", "oldest", "longest", "best", "worst", "moved")


def group_list(
    history: History, state: str, version: int | None, order: str, page: int, size: int
) -> dict[str, Any]:
    """One page of the groups in a state (empty: any) and of a version (None: any)."""
    groups, state_of = history.groups, states(history)
    chosen = np.ones(len(groups), bool)
    if state in STATES:
        chosen &= state_of == STATES.index(state)
    if version is not None:
        chosen &= groups["version"] == version
    found = np.flatnonzero(chosen & (groups["version"] >= 0))
    found = _ordered(history, found, order)
    size = max(1, min(size, PAGE_MAX))
    page = max(0, min(page, (len(found) - 1) // size)) if len(found) else 0
    here = found[page * size : (page + 1) * size]
    rows = [_row(history, int(group), STATES[state_of[group]]) for group in here]
    return {"total": len(found), "page": page, "size": size, "groups": rows}


def _ordered(history: History, found: Any, order: str) -> Any:
    groups = history.groups
    if order == "oldest":
        return found
    found = found[::-1]
    if order == "longest":
        return found[np.argsort(-groups["tokens"][found], kind="stable")]
    if order == "moved":
        return found[np.argsort(-groups["moves"][found], kind="stable")]
    if order in ("best", "worst"):
        scored = found[groups["scored"][found] > 0]
        mean = groups["reward_sum"][scored] / groups["scored"][scored]
        return scored[np.argsort(-mean if order == "best" else mean, kind="stable")]
    return found


def _row(history: History, group: int, state: str) -> dict[str, Any]:
    one = {name: history.groups[name][group] for name in ("version", "prompt", "finished", "scored",
           "tokens", "moves", "fed_step", "step")}  # fmt: skip
    row: dict[str, Any] = {"group": group, "state": state}
    row |= {name: int(value) for name, value in one.items()}
    times = ("issued_s", "ready_s", "fed_s", "ended_s")
    row |= {name: _known(history.groups[name][group]) for name in times}
    if row["scored"] < history.params.group_size:
        row["ready_s"] = None
    row["reward"] = (
        float(history.groups["reward_sum"][group]) / row["scored"] if row["scored"] else None
    )
    step = row["step"] if row["step"] >= 0 else row["fed_step"]
    row["staleness"] = step - row["version"] if step >= 0 else None
    return row


def one_group(history: History, group: int, spans: dict[str, Any]) -> dict[str, Any] | None:
    """A group with its samples and where each of them ran."""
    if not 0 <= group < len(history.groups) or history.groups["version"][group] < 0:
        return None
    size, samples = history.params.group_size, history.samples
    names = list(history.names)
    first = group * size
    mine = (spans["slot"] >= first) & (spans["slot"] < first + size)
    stays: dict[int, list[dict[str, Any]]] = {}
    for place in np.flatnonzero(mine):
        stays.setdefault(int(spans["slot"][place]) - first, []).append(
            {
                "instance": names[int(spans["instance"][place])],
                "version": int(spans["version"][place]),
                "begin": float(spans["begin"][place]),
                "end": float(spans["end"][place]),
                "began": Why(int(spans["began"][place])).name.lower(),
                "ended": _why(int(spans["ended"][place])),
            }
        )
    rows: list[dict[str, Any]] = []
    for sample in range(size):
        slot = first + sample
        code = int(samples["finish"][slot])
        rows.append(
            {
                "sample": sample,
                "tokens": max(0, int(samples["tokens"][slot])),
                "finish": FINISHES[code].value if code >= 0 else "",
                "reward": _known(samples["reward"][slot]),
                "mixed": bool(samples["mixed"][slot]),
                "stays": sorted(stays.get(sample, []), key=lambda stay: stay["begin"]),
            }
        )
    state = STATES[int(states(history)[group])]
    reason = history.reasons.get(group, "")
    return {**_row(history, group, state), "reason": reason, "samples": rows}


def _why(code: int) -> str:
    return Why(code).name.lower() if code >= 0 else "running"


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def trajectory(history: History, files: RunFiles, group: int, sample: int) -> dict[str, Any] | None:
    """A sample with its tokens; None if there is no text of it."""
    if not 0 <= group < len(history.groups):
        return None
    step = int(history.groups["step"][group])
    record = files.rollout(step, group, sample) if step >= 0 else None
    record = record or _under_way(files, group, sample)
    if record is None:
        return None
    decode = _decoder(files)
    ids = record.get("token_ids", [])
    return record | {"pieces": pieces(ids, decode) if decode is not None else []}


def _under_way(files: RunFiles, group: int, sample: int) -> dict[str, Any] | None:
    """A sample that has finished and was not trained (yet): from the table, if it is there."""
    row = peek(files.folder / "table.log", RequestId(group, sample))
    if row is None:
        return None
    arrays = {name: np.asarray(row[name]) for name in ("token_ids", "logprobs", "loss_mask")}
    mask = arrays["loss_mask"]
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return {
        "token_ids": arrays["token_ids"].tolist(),
        "logprobs": arrays["logprobs"].astype(np.float64).round(4).tolist(),
        "turns": [[a, b, int(mask[a])] for a, b in pairwise(edges) if a < b],
        "text": row.get("text", ""),
    }


def pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of each token. Where several make one character, the first has it, the others ''."""
    texts: list[str] = []
    begin = 0
    for end in range(1, len(ids) + 1):
        text = decode(ids[begin:end])
        whole = "�" not in text
        if whole or end - begin == 8:
            texts += [text] + [""] * (end - begin - 1)
            begin = end
    if begin < len(ids):
        texts += [decode(ids[begin:])] + [""] * (len(ids) - begin - 1)
    return texts


def _decoder(files: RunFiles) -> Callable[[Sequence[int]], str] | None:
    model = files.document("config.json").get("model", {}).get("path", "")
    return _decoder_of(str(model), str(files.folder.resolve()))


@cache
def _decoder_of(model: str, folder: str) -> Callable[[Sequence[int]], str] | None:
    """The tokenizer of the model, or of a checkpoint beside the run where the model is gone."""
    from dora_rl.setup.tokenizer import open_tokenizer

    kept = sorted((Path(folder) / "checkpoints").glob("*/tokenizer.json"))
    for place in (Path(model or "/nowhere"), *(path.parent for path in kept)):
        if (place / "tokenizer_config.json").is_file() or (place / "tokenizer.json").is_file():
            try:
                tokenizer = open_tokenizer(place, trust_remote_code=False)
            except (UserError, ImportError):
                continue
            return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)
    return None
