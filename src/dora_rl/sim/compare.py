"""`dora-rl sim`: the modes side by side on one preset, and how many simulated runs are performed.

A flow is a generator that yields the runs it wants and is sent their results, so a search reads
like plain code and never knows who performs it. Invariant: the same job is performed once, and
what a flow returns does not depend on the number of workers.

Colocated modes run once. For the disaggregated ones the split is searched, with runs of full
length: the first steps are filled by the quickest groups and say little. Throughput has one peak
over the split (too few generate, or too few train), and the share of a step in which only rollout
works falls as devices move to rollout. So both the best split and the one with a given rollout-only
share are found by narrowing the gaps between a few first guesses, laid around the split at which
decoding and training would take equally long. Where a published rollout-only share is known, the
split that comes nearest to it is the main result (that is what can be compared with the
publication) and the best split stands beside it.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from dora_rl.data.lengths import mean_of, uniforms
from dora_rl.observe.eventlog import FileLog
from dora_rl.sim.clock import VirtualClock
from dora_rl.sim.hardware import NO_DRAFT
from dora_rl.sim.presets import COLOCATED, Preset, mean_context, world_spec
from dora_rl.sim.run import ModeResult, Timeline, run_mode
from dora_rl.types import Mode, UserError
from dora_rl.user_code import require

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Job:
    """One run. `rollout_devices` None lets the preset decide; `log` is a folder for its events."""

    preset: Preset
    mode: Mode
    seed: int
    rollout_devices: int | None = None
    with_timeline: bool = False
    log: Path | None = None


Flow: TypeAlias = Generator[list[Job], list[ModeResult], T]
See: TypeAlias = Callable[[str, Job, ModeResult], None]
"""Told (name of the flow, job, result) as runs end; may be called from another thread."""


def perform(job: Job) -> ModeResult:
    """Run one job. The timeline comes back closed, without the clock of the run."""
    log = FileLog.create(job.log) if job.log is not None else None
    result = run_mode(
        job.preset,
        job.mode,
        job.seed,
        job.rollout_devices,
        with_timeline=job.with_timeline,
        log=log,
    )
    if log is not None:
        log.close()
    return replace(result, timeline=Timeline(VirtualClock(), result.timeline.close()))


def conduct(flows: Mapping[str, Flow[T]], num_workers: int, see: See) -> dict[str, T]:
    """Drive every flow to its end and return what each returned."""
    # A child dies at once when the user interrupts, without a traceback of its own.
    executor = (
        _Inline()
        if num_workers <= 1
        else ProcessPoolExecutor(
            num_workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=signal.signal,
            initargs=(signal.SIGINT, signal.SIG_DFL),
        )
    )
    try:
        found = _drive(flows, executor, see)
    except BrokenProcessPool as error:
        executor.shutdown(wait=False, cancel_futures=True)
        raise UserError("a simulating process was killed; try --jobs 1 (less memory)") from error
    except BaseException:
        executor.shutdown(wait=False, cancel_futures=True)  # runs may go on for minutes
        raise
    # Every run has ended, so this takes a moment. Without it the interpreter may end while the
    # pool is closing its pipes, and prints a traceback ("Bad file descriptor").
    executor.shutdown(wait=True)
    return found


class _Inline(Executor):
    """Performs a job where it stands."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _drive(flows: Mapping[str, Flow[T]], executor: Executor, see: See) -> dict[str, T]:
    known: dict[Job, Future[ModeResult]] = {}
    asked: dict[str, list[Future[ModeResult]]] = {}
    returned: dict[str, T] = {}

    def submit(name: str, job: Job) -> Future[ModeResult]:
        def tell(done: Future[ModeResult]) -> None:
            if not done.cancelled() and done.exception() is None:
                see(name, job, done.result())

        if job not in known:
            known[job] = executor.submit(perform, job)
            known[job].add_done_callback(tell)
        return known[job]

    asked |= {name: [submit(name, job) for job in next(flow)] for name, flow in flows.items()}
    while asked:
        for name, futures in list(asked.items()):
            if all(future.done() for future in futures):
                try:
                    jobs = flows[name].send([future.result() for future in futures])
                    asked[name] = [submit(name, job) for job in jobs]
                except StopIteration as stop:
                    returned[name] = stop.value
                    del asked[name]
        if pending := [f for futures in asked.values() for f in futures if not f.done()]:
            wait(pending, return_when=FIRST_COMPLETED)
    return {name: returned[name] for name in flows}


# -- the search for a split ------------------------------------------------------------------------


_CHOICES_MAX = 32
_REACH = 0.12  # of the choices, on both sides of the first guess


def splits_of(preset: Preset) -> list[int]:
    """Numbers of rollout devices worth trying: whole instances, at most about 32 of them."""
    tensor = preset.tensor_parallel
    every = list(range(tensor, preset.num_devices - tensor + 1, tensor))
    stride = -(-len(every) // _CHOICES_MAX)
    return every[stride - 1 :: stride]


def balanced_split(preset: Preset) -> int:
    """Where decoding and the trainer would need the same time for a step; a guess, no run."""
    choices = splits_of(preset)
    spec = world_spec(preset, Mode.MULTI_VERSION, 0, choices[0])
    _, instance, cost = spec.instances[0]
    per_request_s = cost.rows_s(NO_DRAFT) + cost.flops_s_per_request()
    per_request_s += mean_context(preset) * cost.kv_s_per_token()
    trajectories = preset.batch_groups * preset.group_size
    inflight = min(preset.inflight_share, preset.max_staleness + 1) * trajectories
    tokens = trajectories * mean_of(preset.lengths)
    per_update = max(1, trajectories // preset.updates_per_step)
    drawn = preset.lengths.draw(uniforms(0, 0, per_update))
    lengths = [preset.prompt_tokens + int(n) for n in drawn]
    longest = max(lengths)

    def step_s(split: int) -> float:
        num = split / preset.tensor_parallel
        running = min(float(instance.slots_max), inflight / num)
        decode_s = cost.step_base_s() + cost.weights_s(round(running)) + running * per_request_s
        train = replace(spec.train, num_devices=preset.num_devices - split)
        update_s = train.samples_s(lengths) + train.imbalance_s(lengths) + train.update_s()
        rollout_s = tokens * decode_s / running / num
        latency_s = longest * decode_s / (preset.max_staleness + 1)  # the bound waits for it
        return max(rollout_s, latency_s, update_s * preset.updates_per_step)

    return min(choices, key=step_s)


def search_split(
    choices: Sequence[int], guess: int, job_of: Callable[[int], Job], share: float | None = None
) -> Flow[dict[int, ModeResult]]:
    """Try splits until the best, and the one nearest to `share`, has no untried neighbour."""
    tried: dict[int, ModeResult] = {}
    places = _first(len(choices), choices.index(guess))
    while places:
        results = yield [job_of(choices[place]) for place in places]
        tried.update(zip(places, results, strict=True))
        wanted = _around_best(tried, len(choices))
        if share is not None:
            wanted |= _around_share(tried, len(choices), share)
        places = sorted(wanted - set(tried))
    return {choices[place]: tried[place] for place in sorted(tried)}


def _first(count: int, guess: int) -> list[int]:
    reach = max(1, round(_REACH * count))
    return sorted({max(0, guess - reach), guess, min(count - 1, guess + reach)})


def _around_best(tried: dict[int, ModeResult], count: int) -> set[int]:
    """Midpoints of the gaps on both sides of the best place so far."""
    best = max(tried, key=lambda place: (tried[place].tokens_per_s, -place))
    below = max((place for place in tried if place < best), default=-1)
    above = min((place for place in tried if place > best), default=count)
    return _middle(below, best) | _middle(best, above)


def _around_share(tried: dict[int, ModeResult], count: int, share: float) -> set[int]:
    """The midpoint of the gap in which the rollout-only share passes `share`."""
    more = (place for place in tried if tried[place].rollout_only_share >= share)
    below = max(more, default=-1)
    return _middle(below, min((place for place in tried if place > below), default=count))


def _middle(low: int, high: int) -> set[int]:
    return {(low + high) // 2} if high - low > 1 else set()


def best_of(tried: dict[int, ModeResult], num: int = 1) -> list[int]:
    """The splits with the highest throughput, best first; of equals the one that trains more."""
    return sorted(tried, key=lambda split: (-tried[split].tokens_per_s, split))[:num]


def nearest_to(tried: dict[int, ModeResult], share: float, num: int = 1) -> list[int]:
    """The splits whose rollout-only share is nearest to `share`, nearest first."""
    return sorted(tried, key=lambda s: (abs(tried[s].rollout_only_share - share), s))[:num]


# -- the comparison --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """One mode. `best` is there when the split was searched; `searched` are all runs."""

    main: ModeResult
    matched: bool = False
    best: ModeResult | None = None
    searched: tuple[ModeResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    preset: Preset
    seed: int
    outcomes: dict[Mode, Outcome]


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """`split` fixes the rollout devices; `shares` are rollout-only shares to match."""

    seed: int = 0
    split: int | None = None
    shares: Mapping[Mode, float] | None = None
    num_workers: int = 1
    with_timeline: bool = False
    log: Path | None = None


def compare(
    preset: Preset, modes: Sequence[Mode], options: CompareOptions, see: See | None = None
) -> Comparison:
    """Run every mode. Wrong input is refused before the first run starts."""
    require(
        (
            options.log is None or len(modes) == 1,
            "an event log is of one run; choose one --mode for --log",
        ),
        (
            options.split is None or not all(mode in COLOCATED for mode in modes),
            "--split is for one_step_off and multi_version; the other modes use all",
        ),
    )
    for mode in modes:
        world_spec(preset, mode, options.seed, options.split).params.validate()
    flows = {mode.value: _flow(preset, mode, options) for mode in modes}
    found = conduct(flows, options.num_workers, see or (lambda name, job, result: None))
    return Comparison(preset, options.seed, {mode: found[mode.value] for mode in modes})


def _flow(preset: Preset, mode: Mode, options: CompareOptions) -> Flow[Outcome]:
    job = Job(preset, mode, options.seed, with_timeline=options.with_timeline)
    if mode in COLOCATED or options.split is not None:
        split = options.split if mode not in COLOCATED else None
        (result,) = yield [replace(job, rollout_devices=split, log=options.log)]
        return Outcome(result)
    share = (options.shares or {}).get(mode)
    tried = yield from search_split(
        splits_of(preset),
        balanced_split(preset),
        lambda split: replace(job, rollout_devices=split),
        share,
    )
    best = best_of(tried)[0]
    main = best if share is None else nearest_to(tried, share)[0]
    if options.log is not None:
        yield [replace(job, rollout_devices=main, log=options.log)]
    return Outcome(tried[main], share is not None, tried[best], tuple(tried.values()))
