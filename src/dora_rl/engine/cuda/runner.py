"""Runs plans on a GPU and never makes it wait for the host.

A step is at most: cache operations, one eager prefill pass per version, one decode pass for all
versions. The decode pass is a CUDA graph per (version slots, rows) bucket, up to the drawn tokens;
its inputs (tokens, positions, block tables) already live on the device, so a steady step is one
graph launch and one small copy back, which the host reads a step later. Rows with filters or
further log-probs are drawn outside the graph.

    launch n     prefill -> decode graph -> copy tokens to pinned memory, record event
    launch n+1   ... enqueued while n still runs
    collect n    wait for n's event, hand the tokens to the engine

Where step n has ended before n + 1 is launched, the GPU waits for the host: `burst` then grows, and
the engine plans several decode steps at once, which are as many graph launches and one copy.

Never reads a device value outside `collect`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dora_rl.engine.cuda.buckets import Bucket, Bursts, first_buckets
from dora_rl.engine.cuda.decoder import CudaDecoder, Rows
from dora_rl.engine.cuda.graphs import Captures, DecodeGraphs
from dora_rl.engine.cuda.guesser import Flown, Guesser, Moment, Timed, places_for
from dora_rl.engine.cuda.kernels.attention import attend_prefill
from dora_rl.engine.cuda.kernels.rows import draw, enter
from dora_rl.engine.cuda.slots import DeviceSlots
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Plan, Span, StepResult, most_of
from dora_rl.engine.runner import Runner
from dora_rl.engine.tensors import sampler
from dora_rl.engine.tensors.cache import KvCache
from dora_rl.engine.tensors.sampler import Drawn, read_burst, read_drawn
from dora_rl.model.directory import TensorSource
from dora_rl.model.spec import ModelSpec
from dora_rl.types import Version

PREFILL_TILE = 64
LOGIT_ROWS_MAX = 512  # rows of logits alive at once in a prefill pass


@dataclass(slots=True)
class Flight:
    """One launched step: what to read once `event` has passed."""

    parts: list[tuple[list[Span], Drawn]] = field(default_factory=list)
    bursts: list[tuple[list[Span], list[int], Tensor]] = field(default_factory=list)
    guessed: list[Flown] = field(default_factory=list[Flown])
    event: torch.cuda.Event | None = None
    timed: Timed | None = None


class CudaRunner(Runner):
    """On a GPU. Not exact: its kernels choose their order of sums by the shape of the batch."""

    loads_aside = True

    def __init__(self, spec: ModelSpec, options: EngineOptions) -> None:
        self.on_gpu = options.device.startswith("cuda")
        if self.on_gpu:
            torch.cuda.set_device(torch.device(options.device).index or 0)
        super().__init__(spec, options)
        self.depth = 1 if options.async_steps else 0
        self._bursts = Bursts(options.burst_max)
        self._last: torch.cuda.Event | None = None
        self._drawn: dict[int, Tensor] = {}  # by number of rows: [step, 2, row], see `draw`
        self.lora = self.weights.adapters is not None
        self.decoder = CudaDecoder(spec, self.weights, self.context)
        guesses = options.speculation == "on" and self.depth > 0 and self.cache.routing is None
        self.slots = DeviceSlots(
            options.seqs_max,
            self.blocks_max,
            self.cache.scrap_block,
            options.device,
            places_for(options.burst_max) if guesses else options.burst_max,
        )
        self._load_stream = torch.cuda.Stream(options.device) if self.on_gpu else None
        graphs = options.cuda_graphs and self.on_gpu
        where = options.seqs_max, options.block_tokens, options.device, graphs
        self._hidden = DecodeGraphs(self._hidden_pass, *where)
        self._drawing = DecodeGraphs(self._drawing_pass, *where)
        self._guesser: Guesser | None = None
        self._guessing: dict[int, DecodeGraphs[tuple[Tensor, Tensor]]] = {}  # by rows of a version
        self._graphs_of = where
        self._captures = Captures(options.device, graphs and guesses)
        if guesses:
            self._guesser = Guesser(self.slots, self.context, options.device)
            self.guessing = self._guesser.guessing

    def load(self, slot: int, source: TensorSource, where: str) -> Iterator[str]:
        """On a stream of its own: nothing that is launched meanwhile waits for it."""
        if self._load_stream is None:
            return self.weights.load_version(slot, source, where)
        with torch.cuda.stream(self._load_stream):
            layers = list(self.weights.load_version(slot, source, where))
        self._load_stream.synchronize()
        return iter(layers)

    def warm_up(self, plain: bool) -> Iterator[None]:
        """Compile kernels and capture graphs that nearly every run needs, one at a time; `plain` as
        requests are. Kernels are compiled apart for numbers of rows that 16 divides."""
        for num_rows in (64, 65):
            if num_rows <= self.context:
                self.score(0, [0] * num_rows)
            yield
        graphs = self._drawing if plain else self._hidden
        versions_max = 1 if self.lora else self.options.versions_max
        for bucket in first_buckets(versions_max, self.options.seqs_max, self.blocks_max):
            try:
                with torch.inference_mode():
                    graphs.capture(bucket, self.slots)
            except torch.OutOfMemoryError:
                return  # what is needed is captured when it is needed
            yield

    def launch(self, plan: Plan, slots: Mapping[Version, int]) -> Flight:
        try:
            return self._launch(plan, slots)
        except BaseException:
            self.slots.lose_count()  # some of its passes may have run, others not
            raise

    @torch.inference_mode()
    def _launch(self, plan: Plan, slots: Mapping[Version, int]) -> Flight:
        if not plan.guess_rows:
            self._choose_burst()
        self.slots.turn()
        self.cache.perform(plan)
        flight = Flight()
        if self.guessing is not None and self.guessing.is_awake and plan.is_decode():
            most = most_of((span.seq for span in plan.spans), together=self.lora)
            flight.timed = Timed(most, plan.guess_rows, plan.repeat, Moment(self.on_gpu))
        self.slots.update(plan.spans, slots if self.lora else None)
        if plan.guess_rows:
            self._guess(plan, slots, flight)
            return self._launched(flight)
        decode: dict[int, list[Span]] = {}
        prefill: dict[int, list[Span]] = {}
        for span in plan.spans:
            drawn_alone = span.num_rows == 1 and span.sample and span.num_logits == 1
            group = decode if drawn_alone else prefill
            # LoRA versions are rows of one batch; a row finds its adapter on the device.
            slot = 0 if self.lora else slots[span.seq.version]
            group.setdefault(slot, []).append(span)
        for slot in sorted(prefill):
            self._prefill(slot, prefill[slot], flight)
        if decode:
            passes = [decode] if self.options.one_pass else [{v: s} for v, s in decode.items()]
            for part in passes:
                self._decode(part, flight, plan.repeat)
        return self._launched(flight)

    def _launched(self, flight: Flight) -> Flight:
        if flight.timed is not None:
            flight.timed.ended = Moment(self.on_gpu)
        if self.on_gpu:
            flight.event = self._last = self.slots.finished()
        return flight

    def _choose_burst(self) -> None:
        """Longer where the GPU has run out of work since the last launch."""
        if self.depth and self._last is not None:
            self.burst = self._bursts.after(self.burst, starved=self._last.query())

    def collect(self, launched: Flight) -> list[StepResult]:
        if launched.event is not None:
            launched.event.synchronize()
            if launched.event is self._last:
                self._last = None  # nothing is in flight: that the GPU is idle says nothing
        if launched.timed is not None and self.guessing is not None:
            timed = launched.timed
            self.guessing.time(*timed.most, timed.rows, timed.seconds())
        found = [r for spans, drawn in launched.parts for r in read_drawn(spans, drawn)]
        for spans, rows, data in launched.bursts:
            found += read_burst(spans, rows, data.numpy())
        for flown in launched.guessed:
            assert self._guesser is not None
            found += self._guesser.read(flown)
        return found

    def settle(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        self._last = None
        if self._guesser is not None:
            self._guesser.forget()

    @torch.inference_mode()
    def score(self, slot: int, token_ids: Sequence[int]) -> list[float]:
        """Float32 log-prob of each token after the first, without touching the KV pool."""
        count = len(token_ids)
        num_blocks = -(-count // self.options.block_tokens)
        scratch = KvCache(self.spec, self.options, num_blocks)
        ids = self.slots.upload(token_ids, torch.int64)
        zeros = torch.zeros(count, dtype=torch.int64, device=ids.device)
        positions = torch.arange(count, dtype=torch.int32, device=ids.device)
        table = torch.arange(num_blocks, dtype=torch.int32, device=ids.device)[None]
        base = 0 if self.lora else slot
        adapters = torch.full_like(zeros, slot) if self.lora else None
        embedded = self.decoder.embed(ids, base)
        rows = Rows(base, 1, count, embedded, zeros, positions, table, adapters)
        tiles = self._tiles([(0, 0, 0, count)])
        hidden = self.decoder.forward(
            rows,
            scratch,
            lambda q, pool, *how: attend_prefill(q, pool, table, tiles, PREFILL_TILE, *how),
        )
        logits = self.decoder.logits(hidden[:-1], base)
        return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0].tolist()

    # ----------------------------------------------------------------- prefill

    def _prefill(self, slot: int, spans: list[Span], flight: Flight) -> None:
        """All prefill rows of one version in one eager pass, then their logits."""
        token_ids: list[int] = []
        pieces: list[tuple[int, int, int, int]] = []
        logit_rows: list[int] = []
        for span in spans:
            row = len(token_ids)
            token_ids.extend(span.seq.row_ids(span.start, span.num_rows, span.drafts))
            pieces.append((span.seq.slot, row, span.start, span.num_rows))
            first = row + span.logits_start - span.start
            logit_rows.extend(range(first, first + span.num_logits))
        slots, firsts, starts, counts = np.array(pieces).T
        positions = np.arange(len(token_ids)) + np.repeat(starts - firsts, counts)
        owners = self.slots.upload(np.repeat(slots, counts), torch.int64)
        rows = Rows(
            slot,
            1,
            len(token_ids),
            self.decoder.embed(self.slots.upload(token_ids, torch.int64), slot),
            owners,
            self.slots.upload(positions, torch.int32),
            self.slots.table,
            self.slots.adapter[owners] if self.lora else None,
            wanted=self.slots.upload(_filled_up(logit_rows), torch.int64),
        )
        wanted, recorded = rows.wanted, self.cache.routing is not None
        if recorded:  # of all rows, in all layers
            rows = replace(rows, wanted=None)
        tiles = self._tiles(pieces)
        hidden = self.decoder.forward(
            rows,
            self.cache,
            lambda q, pool, *how: attend_prefill(
                q, pool, self.slots.table, tiles, PREFILL_TILE, *how
            ),
        )
        if recorded:
            hidden = hidden[wanted]
        if logit_rows:
            self._sample_prefill(slot, spans, hidden[: len(logit_rows)], flight)

    def _sample_prefill(self, slot: int, spans: list[Span], hidden: Tensor, flight: Flight) -> None:
        """Logits in bounded pieces; tokens go back to their slots."""
        start = 0
        for part in _bounded([span for span in spans if span.num_logits]):
            count = sum(span.num_logits for span in part)
            logits = self.decoder.logits(hidden[start : start + count], slot)
            start += count
            flight.parts.append((part, self._to_host(self._sample(part, logits))))

    def _tiles(self, pieces: Sequence[tuple[int, int, int, int]]) -> Tensor:
        """(slot, row, position, rows) of every tile of query rows."""
        tiles = [
            (slot, row + i, position + i, min(PREFILL_TILE, count - i))
            for slot, row, position, count in pieces
            for i in range(0, count, PREFILL_TILE)
        ]
        return self.slots.upload(tiles, torch.int32)

    # ------------------------------------------------------------------ decode

    def _decode(self, groups: dict[int, list[Span]], flight: Flight, repeat: int) -> None:
        every = [span for spans in groups.values() for span in spans]
        self.slots.sync_tokens(every)
        if all(span.seq.plain for span in every):
            launched = self._drawing.run(groups, self.slots, repeat)
            self.slots.mark(every, repeat)
            rows = [row for v, spans in groups.items() for row in launched.rows_of(v, len(spans))]
            drawn = launched.result[launched.begun : launched.begun + repeat]
            flight.bursts.append((every, rows, self.slots.download_aside(drawn)))
            return
        assert repeat == 1, "a burst draws on the device"
        decoded = self._hidden.run(groups, self.slots)
        for slot, spans in sorted(groups.items()):
            rows = decoded.rows_of(slot, len(spans))
            logits = self.decoder.logits(decoded.result[rows.start : rows.stop], slot)
            flight.parts.append((spans, self._to_host(self._sample(spans, logits))))

    def _hidden_pass(self, bucket: Bucket, slots: Tensor) -> Tensor:
        """Hidden states of [version, row] rows; what a graph captures."""
        return self._decode_pass(bucket, slots)[0]

    def _decode_pass(self, bucket: Bucket, slots: Tensor) -> tuple[Tensor, Rows]:
        state = self.slots
        embed = self.weights.embed[bucket.first : bucket.first + bucket.num_versions]
        x, positions = enter(slots, state.last_token, state.position, state.step, embed)
        x = self.decoder.entered(x)
        adapters = state.adapter[slots] if self.lora else None
        where = (x, slots, positions, state.table, adapters)
        rows = Rows(*bucket[:3], *where, bucket.blocks_max)
        hidden = self.decoder.forward(rows, self.cache, None)
        return hidden, rows

    def _drawing_pass(self, bucket: Bucket, slots: Tensor) -> Tensor:
        """The decode pass, the head and the draw of every row; see `draw` for what it gives."""
        hidden, rows = self._decode_pass(bucket, slots)
        return self._draw(rows, hidden, advance=True)

    # ----------------------------------------------------------------- guesses

    def _guess(self, plan: Plan, slots: Mapping[Version, int], flight: Flight) -> None:
        """A burst in which the device has guesses of its own in some of its rows."""
        assert self._guesser is not None
        reach = self._guesser.prepare(plan.spans, self.options.block_tokens)
        groups: dict[int, list[Span]] = {}
        for span in plan.spans:
            groups.setdefault(0 if self.lora else slots[span.seq.version], []).append(span)
        num_rows = plan.guess_rows
        assert num_rows >= max(map(len, groups.values())), "a row for each request at least"
        if num_rows not in self._guessing:
            decode = partial(self._guessing_pass, num_rows)
            self._guessing[num_rows] = DecodeGraphs(decode, *self._graphs_of, self._captures)
        launched = self._guessing[num_rows].run(groups, self.slots, plan.repeat, reach)
        every = [span for spans in groups.values() for span in spans]
        places = [row for v, spans in groups.items() for row in launched.rows_of(v, len(spans))]
        burst = slice(launched.begun, launched.begun + plan.repeat)
        drawn, info = (self.slots.download_aside(data[burst]) for data in launched.result)
        most = most_of((span.seq for span in every), together=self.lora)
        flown = Flown(every, places, most, num_rows, drawn, info)
        flight.guessed.append(flown)
        self._guesser.flew()

    def _guessing_pass(self, num_rows: int, bucket: Bucket, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The drawing pass with `num_rows` rows of a version; see `guesses` for what it gives."""
        guesser, state = self._guesser, self.slots
        assert guesser is not None
        embed = self.weights.embed[bucket.first : bucket.first + bucket.num_versions]
        entered, info = guesser.enter(slots, embed, num_rows)
        adapters = state.adapter[entered.slots] if self.lora else None
        rows = Rows(
            bucket.first,
            bucket.num_versions,
            num_rows,
            entered.x,
            entered.slots,
            entered.positions,
            state.table,
            adapters,
            bucket.blocks_max,
            fresh=guesser.guesses_max,
        )
        hidden = self.decoder.forward(rows, self.cache, None)
        drawn = self._draw(rows, hidden, advance=False)
        guesser.accept(slots, entered.tokens, drawn, info)
        return drawn, info

    # ---------------------------------------------------------------- sampling

    def _draw(self, rows: Rows, hidden: Tensor, advance: bool) -> Tensor:
        """The head and the draw of every row; see `draw` for what it gives."""
        logits, chunks = self.decoder.scored_logits(
            hidden, rows.first, rows.num_versions, rows.slots, self.slots.temperature
        )
        count = len(rows.slots)
        if count not in self._drawn:
            shape = (self.slots.steps_max, 2, count)
            self._drawn[count] = torch.zeros(shape, dtype=torch.int32, device=rows.slots.device)
        out = self._drawn[count]
        draw(logits, chunks, rows.slots, rows.positions, self.slots, out, advance)
        return out

    def _sample(self, spans: list[Span], logits: Tensor) -> Drawn:
        """The general sampler (filters, forced tokens, top log-probs), still on the device."""
        rows = sampler.sampling_rows(spans)
        for name in ("keys", "positions", "temperature", "top_k", "top_p", "min_p", "forced"):
            value: Tensor = getattr(rows, name)
            setattr(rows, name, self.slots.upload(value.numpy(), value.dtype))
        drawn = sampler.sample(logits, rows)
        ends = np.cumsum([span.num_logits for span in spans]) - 1
        # Which token of a span with drafts is its newest, the host finds out.
        drawn_last = [span.sample and not span.drafts for span in spans]
        sampled = [(s, end) for s, end, last in zip(spans, ends, drawn_last, strict=True) if last]
        if sampled:
            slots = self.slots.upload([span.seq.slot for span, _ in sampled], torch.int64)
            last = self.slots.upload([int(end) for _, end in sampled], torch.int64)
            positions = [span.start + span.num_rows for span, _ in sampled]
            self.slots.last_token[slots] = drawn.token_ids[last]
            self.slots.position[slots] = self.slots.upload(positions, torch.int32)
            self.slots.mark([span for span, _ in sampled])
        return drawn

    def _to_host(self, drawn: Drawn) -> Drawn:
        """Start copying the results back; they are complete once the flight's event passed."""

        def copy(data: Tensor | None) -> Tensor | None:
            return None if data is None else self.slots.download(data)

        return Drawn(
            self.slots.download(drawn.token_ids),
            self.slots.download(drawn.logprobs),
            copy(drawn.raw_logprobs),
            copy(drawn.top_ids),
            copy(drawn.top_logprobs),
        )


def _filled_up(rows: list[int]) -> list[int]:
    """To a multiple of 16, for which kernels are compiled, not for every kind of number."""
    return rows + rows[-1:] * (-len(rows) % 16)


def _bounded(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Groups of spans with at most `LOGIT_ROWS_MAX` logit rows (or one long span alone)."""
    part: list[Span] = []
    count = 0
    for span in spans:
        if part and count + span.num_logits > LOGIT_ROWS_MAX:
            yield part
            part, count = [], 0
        part.append(span)
        count += span.num_logits
    if part:
        yield part
