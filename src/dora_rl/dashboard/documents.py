"""What each view of the dashboard shows, as plain JSON values.

Figures come from the event log through `observe.history`, and from the run's files where the log
does not know (metrics, measured busy times). Everything is computed over whole arrays; nothing
here grows with the run except by the arrays themselves, and no document does.

Text is in rollouts.jsonl once its group was trained; before that, and for a while for groups that
were not, in the table. Lengths, rewards and places the log always tells. Token texts need the
model's tokenizer; without one a token is shown by its id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.core.actions import End
from dora_rl.dashboard.run_files import SILENT_S, RunFiles
from dora_rl.envs.base import spans as spans_of
from dora_rl.observe.history import ENDS, FINISHES, History
from dora_rl.observe.measures import (
    idle_ratio,
    rollout_busy_s,
    tokens_of_line,
    tokens_per_s,
    trainer_busy_s,
)
from dora_rl.observe.placements import Why, busy_s
from dora_rl.store.table import peek
from dora_rl.store.trajectories import rounded
from dora_rl.types import Mode, RequestId, UserError

STATES = ("generating", "scoring", "ready", "taken", *(end.value for end in ENDS))
_FIRST_END = 4
INCIDENTS_SHOWN = 30
# The log does not know of start-up and of pauses between a stop and its resume; the run does.
MEASURED = ("time/step", "perf/tokens_per_s")
BINS_OF_LENGTHS = 40


def states(history: History) -> NDArray[Any]:
    """The state of every group, as a place in `STATES`."""
    groups, size = history.groups, history.params.group_size
    ended, taken = groups["end"] >= 0, groups["fed_step"] >= 0
    rules = [ended, taken, groups["scored"] >= size, groups["finished"] >= size]
    return np.select(rules, [_FIRST_END + groups["end"], 3, 2, 1], 0)


def status(history: History, files: RunFiles) -> str:
    """finished, stopped (resumable), live, or silent: nobody writes and nobody said stop."""
    if history.stop is not None:
        return "finished" if history.stop.done else "stopped"
    return "live" if files.silent_s() < SILENT_S else "silent"


def headline(history: History, files: RunFiles) -> dict[str, Any]:
    """What a run is, how far it has come and how well it does."""
    params, trained = history.params, history.trained()
    return {
        "name": files.folder.resolve().name,
        "status": status(history, files),
        "mode": params.mode.value,
        "step": history.committed,
        "num_steps": params.num_steps,
        "max_staleness": params.max_staleness,
        "batch_groups": params.batch_groups,
        "group_size": params.group_size,
        "now": history.now_s,
        **token_figures(history, files, trained),
        "evaluation": files.evaluations[-1] if files.evaluations else None,
        "evaluation_first": files.evaluations[0] if files.evaluations else None,
        "promises": _promises(history, trained),
        "rewards": series(history)["reward/mean"],
    }


def overview(history: History, files: RunFiles) -> dict[str, Any]:
    return headline(history, files) | {
        "stop": history.stop.reason if history.stop is not None else "",
        "num_entries": history.num_entries,
        "num_instances": len(history.names),
        "versions": _live_versions(history),
        "states": dict(
            zip(STATES, np.bincount(states(history), minlength=len(STATES)).tolist(), strict=True)
        ),
        "migrations": len(history.moves),
        "kv_bytes_moved": int(history.moves["num_bytes"].sum()),
        "num_resumes": sum(i.kind == "resumed" for i in history.incidents),
        "waiting": _waiting(history),
        "incidents": [i.as_json() for i in history.incidents[-INCIDENTS_SHOWN:][::-1]],
        "set_aside": [{"prompt": p, "reason": r} for p, r in history.set_aside.items()],
    }


def configuration(files: RunFiles) -> list[dict[str, Any]]:
    """Every key that the run has, as `section.key`, with its value and what it would be if nothing
    were said. A key that this release does not know has no default."""
    from pydantic_core import to_jsonable_python  # not needed to open the page

    from dora_rl.config import RunConfig

    found: list[dict[str, Any]] = []
    for name, section in files.document("config.json").items():
        field = RunConfig.model_fields.get(name)
        known = getattr(field.annotation, "model_fields", {}) if field is not None else {}
        for key, value in section.items() if isinstance(section, dict) else [("", section)]:
            rule = known.get(key)
            default = None
            if rule is not None and not rule.is_required():
                default = to_jsonable_python(rule.get_default(call_default_factory=True))
            row = {"key": f"{name}.{key}".rstrip("."), "value": value, "default": default}
            found.append(row | {"changed": default != value})
    return found


def token_figures(history: History, files: RunFiles, trained: NDArray[Any]) -> dict[str, Any]:
    """As the run's own files have them, so that all places show the same; a simulated run has a
    log alone, and no tokens that were not the policy's. None: a step's line lacks its figures."""
    generated = files.document("totals.json").get("tokens_generated")
    try:
        tokens, lasted_s = sum(map(tokens_of_line, files.steps)), training_s(files)
        if not files.steps:
            tokens, lasted_s = int(history.groups["tokens"][trained].sum()), history.now_s
        rate = tokens_per_s([tokens], [lasted_s])
    except KeyError:
        tokens = rate = None
    generated = int(history.groups["tokens"].sum()) if generated is None else generated
    return {"tokens_trained": tokens, "tokens_generated": generated, "tokens_per_s": rate}


def training_s(files: RunFiles) -> float:
    """See `observe.measures`."""
    cut_s = files.document("totals.json").get("cut_s", 0.0)
    return sum(line["time/step"] for line in files.steps) + cut_s


def _live_versions(history: History) -> list[int]:
    running = np.unique(history.groups["version"][history.groups["end"] < 0])
    return sorted({*running.tolist(), history.committed})[-12:] if len(history.groups) else []


def _promises(history: History, trained: NDArray[Any]) -> dict[str, Any]:
    groups, mode = history.groups, history.params.mode
    staleness = (groups["step"] - groups["version"])[trained]
    scored = groups["scored"][trained].astype(np.int64)
    num_samples = int(scored.sum())
    lost = np.isin(groups["end"], [ENDS.index(end) for end in (End.FAILED, End.SURPLUS, End.LOST)])
    size = history.params.group_size
    tokens = history.samples["tokens"][: len(groups) * size].reshape(-1, size)
    reward = history.samples["reward"][: len(groups) * size].reshape(-1, size)
    failed = trained[:, None] & np.isnan(reward) & (tokens > 0)  # in groups that were trained
    return {
        "mixed": int(groups["mixed"][trained].sum()),
        "samples": num_samples,
        "mixed_given_up": mode is Mode.PARTIAL,
        "discarded": int(lost.sum()),
        "discarded_tokens": int(groups["tokens"][lost].sum() + tokens[failed].sum()),
        "discarded_given_up": mode is Mode.REPLICATION,
        "staleness_max": int(staleness.max(initial=0)),
        "staleness_mean": float(staleness @ scored) / max(1, num_samples),
    }


def _waiting(history: History) -> dict[str, Any] | None:
    """What the trainer waits for now: the last wait, if nothing was fed after it."""
    if not history.waits or history.stop is not None:
        return None
    wait = history.waits[-1]
    fed = history.groups["fed_s"]
    if (fed > wait.begin_s).any():
        return None
    left = [g for g in wait.groups if np.isnan(fed[g])]
    return {"step": wait.step, "groups": left[:12], "since": wait.begin_s} if left else None


def series(history: History) -> dict[str, dict[str, Any]]:
    """Curves over steps that the log alone gives."""
    return {name: curve(np.arange(len(y)), y) for name, y in history.curves().items()}


def metrics(history: History, files: RunFiles) -> dict[str, Any]:
    """Every curve: of the log, of metrics.jsonl, of the evaluations."""
    found = series(history)
    steps = [line["step"] for line in files.steps]
    for name in sorted({name for line in files.steps[-50:] for name in line} - {"step"}):
        values = [line.get(name) for line in files.steps]
        numbers = all(isinstance(v, (int, float, type(None))) for v in values)
        if numbers and (name not in found or name in MEASURED):
            found[name] = curve(np.array(steps), np.array(values, dtype=np.float64))
    versions = np.array([line["version"] for line in files.evaluations])
    scored: dict[str, Any] = {}
    for name in sorted({name for line in files.evaluations for name in line} - {"version"}):
        values = [line.get(name) for line in files.evaluations]
        if not any(isinstance(value, str) for value in values):
            scored[name] = curve(versions, np.array(values, dtype=np.float64))
    return {
        "steps": found,
        "evaluations": scored,
        "axes": axes(history),
        "num_steps": history.params.num_steps,
    }


def axes(history: History) -> dict[str, Any]:
    """What else a curve may be drawn over: seconds of the log, and tokens trained, at the end of
    each step."""
    groups, trained = history.groups, history.trained()
    num = history.committed
    tokens = np.bincount(groups["step"][trained], groups["tokens"][trained], num)[:num].cumsum()
    done = np.array([history.steps[s].committed_s for s in range(num)], np.float64)
    steps = np.arange(num)
    return {"seconds": curve(steps, done), "tokens": curve(steps, tokens)}


POINTS_MAX = 600


def curve(x: NDArray[Any], y: NDArray[Any]) -> dict[str, Any]:
    """At most `POINTS_MAX` points: means, with the extremes between them so that none is hidden."""
    size = -(-len(x) // POINTS_MAX) if len(x) else 1
    if size == 1:
        return {"x": x.tolist(), "y": _plain(y)}
    edges = np.arange(0, len(x), size)
    mean = np.add.reduceat(np.where(np.isnan(y), 0.0, y), edges) / np.diff(np.append(edges, len(x)))
    low, high = np.fmin.reduceat(y, edges), np.fmax.reduceat(y, edges)
    middle = x[np.minimum(edges + size // 2, len(x) - 1)]
    return {"x": middle.tolist(), "y": _plain(mean), "low": _plain(low), "high": _plain(high)}


def _plain(values: NDArray[Any]) -> list[float | None]:
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in values.tolist()]


def distributions(history: History) -> dict[str, Any]:
    groups, samples = history.groups, history.samples
    trained = history.trained()
    staleness = (groups["step"] - groups["version"])[trained]
    tokens, finish = samples["tokens"], samples["finish"]
    done = tokens >= 0
    most = int(tokens.max(initial=1))
    edges = np.unique(np.geomspace(1, most + 1, BINS_OF_LENGTHS + 1).astype(np.int64))
    by_finish = {
        word.value: np.histogram(tokens[done & (finish == code)], edges)[0].tolist()
        for code, word in enumerate(FINISHES)
        if (done & (finish == code)).any()
    }
    reward = samples["reward"][np.isfinite(samples["reward"])]
    counts, at = np.histogram(reward, 20) if len(reward) else (np.zeros(0), np.zeros(0))
    quantiles = np.quantile(tokens[done], (0.5, 0.9, 0.99)).tolist() if done.any() else [0, 0, 0]
    return {
        "staleness": np.bincount(staleness).tolist() if len(staleness) else [],
        "max_staleness": history.params.max_staleness,
        "num_trained": int(trained.sum()),
        "length_edges": edges.tolist(),
        "lengths": by_finish,
        "num_samples": int(done.sum()),
        "length_quantiles": dict(zip(("p50", "p90", "p99"), quantiles, strict=True)),
        "length_max": most if done.any() else 0,
        "rewards": counts.tolist(),
        "reward_edges": at.tolist(),
    }


def throughput(history: History, files: RunFiles, spans: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """Rates and idle shares. Measured busy times come from the workers, spans from the log."""
    names, wall = list(history.names), max(history.now_s, 1e-9)
    busy = busy_s(spans["begin"], spans["end"], spans["instance"], len(names))
    totals, summary = files.document("totals.json"), files.document("summary.json")
    measured, training = totals.get("busy_s", {}), training_s(files)
    running = np.bincount(spans["instance"], spans["end"] - spans["begin"], len(names)) / wall
    return {
        "instances": [
            {
                "name": name,
                "slots": history.slots_max.get(name, 0),
                "running": float(running[code]),
                "empty": float(max(0.0, 1 - busy[code] / wall)),
                "idle": idle_ratio([measured[name]] if name in measured else [], training),
            }
            for name, code in sorted(history.names.items())
        ],
        "trainer_idle": idle_ratio(trainer_busy_s(measured), training),
        "rollout_idle": idle_ratio(rollout_busy_s(measured), training),
        "device_idle": summary.get("device_idle_ratio"),
        "cpu_unused": summary.get("cpu_unused_ratio"),
        "drafted": totals.get("drafted_tokens", 0),
        "accepted": totals.get("accepted_tokens", 0),
        "wall": wall,
        "curves": metrics(history, files)["steps"],
    }


# -- groups and trajectories -----------------------------------------------------------------------


PAGE_MAX = 200
TEXT_MAX = 200  # of a prompt in a list


def group_list(
    history: History,
    files: RunFiles,
    state: str,
    version: int | None,
    order: str,
    page: int,
    size: int,
) -> dict[str, Any]:
    """One page of the groups in a state (empty: any) and of a version (None: any)."""
    groups, state_of = history.groups, states(history)
    chosen = np.ones(len(groups), bool)
    if state in STATES:
        chosen &= state_of == STATES.index(state)
    if version is not None:
        chosen &= groups["version"] == version
    found = _ordered(history, np.flatnonzero(chosen & (groups["version"] >= 0)), order)
    size = max(1, min(size, PAGE_MAX))
    page = max(0, min(page, (len(found) - 1) // size)) if len(found) else 0
    here = found[page * size : (page + 1) * size]
    rows = [_row(history, int(group), STATES[state_of[group]]) for group in here]
    texts = files.prompts([row["prompt"] for row in rows])
    rows = [row | {"text": texts.get(row["prompt"], "")[:TEXT_MAX]} for row in rows]
    return {"total": len(found), "page": page, "size": size, "groups": rows}


def _ordered(history: History, found: Any, order: str) -> Any:
    groups = history.groups
    if order == "oldest":
        return found
    found = found[::-1]
    if order in ("longest", "moved"):
        most = groups["tokens" if order == "longest" else "moves"][found]
        return found[np.argsort(-most, kind="stable")]
    if order in ("best", "worst"):
        scored = found[groups["scored"][found] > 0]
        mean = groups["reward_sum"][scored] / groups["scored"][scored]
        return scored[np.argsort(-mean if order == "best" else mean, kind="stable")]
    return found


def _row(history: History, group: int, state: str) -> dict[str, Any]:
    counts = ("version", "prompt", "finished", "scored", "tokens", "moves", "fed_step", "step")
    row: dict[str, Any] = {"group": group, "state": state}
    row |= {name: int(history.groups[name][group]) for name in counts}
    row |= {
        name: known(history.groups[name][group])
        for name in ("issued_s", "ready_s", "fed_s", "ended_s")
    }
    if row["scored"] < history.params.group_size:
        row["ready_s"] = None
    total = float(history.groups["reward_sum"][group])
    row["reward"] = total / row["scored"] if row["scored"] else None
    step = row["step"] if row["step"] >= 0 else row["fed_step"]
    row["staleness"] = step - row["version"] if step >= 0 else None
    return row


def one_group(
    history: History, files: RunFiles, group: int, spans: dict[str, Any]
) -> dict[str, Any] | None:
    """A group with its samples and where each of them ran."""
    if not 0 <= group < len(history.groups) or history.groups["version"][group] < 0:
        return None
    size, samples = history.params.group_size, history.samples
    names = list(history.names)
    first = group * size
    mine = (spans["slot"] >= first) & (spans["slot"] < first + size)
    columns = ("slot", "instance", "version", "begin", "end", "began", "ended")
    stays: dict[int, list[dict[str, Any]]] = {first + sample: [] for sample in range(size)}
    for slot, instance, version, begin, end, began, ended in zip(
        *(spans[name][mine].tolist() for name in columns), strict=True
    ):
        stay = {"instance": names[instance], "version": version, "begin": begin, "end": end}
        why = Why(ended).name.lower() if ended >= 0 else "running"
        stays[slot].append(stay | {"began": Why(began).name.lower(), "ended": why})
    rows = [
        {
            "sample": sample,
            "tokens": max(0, int(samples["tokens"][first + sample])),
            "finish": ("", *FINISHES)[int(samples["finish"][first + sample]) + 1],
            "reward": known(samples["reward"][first + sample]),
            "mixed": bool(samples["mixed"][first + sample]),
            "stays": sorted(stays[first + sample], key=lambda stay: stay["begin"]),
        }
        for sample in range(size)
    ]
    row = _row(history, group, STATES[int(states(history)[group])])
    return {
        **row,
        "text": files.prompts([row["prompt"]]).get(row["prompt"], ""),
        "reason": history.reasons.get(group, ""),
        "samples": rows,
    }


def known(value: float) -> float | None:
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
    model = files.document("config.json").get("model", {}).get("path", "")
    decode = _decoder_of(str(model), str(files.folder.resolve()))
    ids = record.get("token_ids", [])
    return record | {"pieces": pieces(ids, decode) if decode is not None else []}


def _under_way(files: RunFiles, group: int, sample: int) -> dict[str, Any] | None:
    """A sample that has finished and was not trained (yet): from the table, if it is there. On a
    cluster the controller's table has no tokens; those of the shards have."""
    tables = sorted(files.folder.glob("table*.log"))
    rows = (peek(path, RequestId(group, sample)) for path in tables)
    row = next((row for row in rows if row is not None and "token_ids" in row), None)
    if row is None:
        return None
    return {
        "token_ids": np.asarray(row["token_ids"]).tolist(),
        "logprobs": rounded(row["logprobs"]),
        "turns": [list(turn) for turn in spans_of(np.asarray(row["loss_mask"]).tolist())],
        "text": row.get("text", ""),
    }


def pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The text of each token. Where several make one character, the first has it, the others ''."""
    texts: list[str] = []
    begin = 0
    for end in range(1, len(ids) + 1):
        text = decode(ids[begin:end])
        if "�" not in text or end - begin == 8 or end == len(ids):
            texts += [text] + [""] * (end - begin - 1)
            begin = end
    return texts


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
