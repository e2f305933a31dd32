"""What guesses gain on a GPU, with a real model and its prompts: `rollout.speculation` on and off.

    python benchmarks/speculation.py --model models/Qwen2.5-1.5B-Instruct --prompts gsm8k.jsonl
    python benchmarks/speculation.py --model DIR --prompts FILE --requests 8,32,128 --json gpu.json

Both engines are in one process and take turns. Two texts: `real` is what the model says to the
prompts at temperature 1, eight samples of each; `random` is the same at so high a temperature that
it says anything, so that nothing can be guessed. A group begins as soon as there is room for all of
it among so many requests, as in a run. The first round warms up: kernels are compiled, graphs are
captured, the engine learns. Shown are, over all other rounds, the decoded tokens of a second from
the first prompt to the last answer, and of those steps alone in which nine of ten places were
taken; then what was guessed and accepted, and what a step was measured to take, by rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import read_spec
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.types import RequestId, SamplingParams

GROUP = 8
HOT = 100.0  # a temperature at which every token is as likely as any other
SYSTEM = "Reason step by step and put the final answer in \\boxed{}."
TOKENS_OF = {"real": 512, "random": 192}
FULL = 0.9


@dataclass(slots=True)
class Rate:
    """Tokens and seconds: of everything, and of full steps alone."""

    tokens: int = 0
    seconds: float = 0.0
    full_tokens: int = 0
    full_seconds: float = 0.0
    same: dict[RequestId, list[int]] = field(default_factory=dict[RequestId, list[int]])

    def add(self, other: Rate) -> None:
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.full_tokens += other.full_tokens
        self.full_seconds += other.full_seconds

    def all(self) -> float:
        return self.tokens / self.seconds

    def full(self) -> float:
        return self.full_tokens / self.full_seconds if self.full_seconds else float("nan")


def prompts_of(args: argparse.Namespace) -> Iterator[tuple[int, ...]]:
    """Token ids, without end."""
    tokenizer = open_tokenizer(args.model, False)
    rows = [json.loads(line) for line in args.prompts.read_text().splitlines()[: args.rows]]
    texts = [row[args.column] for row in rows]
    if getattr(tokenizer, "chat_template", None):
        texts = [
            tokenizer.apply_chat_template(
                [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for text in texts
        ]
    return itertools.cycle([tuple(tokenizer.encode(text)) for text in texts])


def make_engine(args: argparse.Namespace, mode: str) -> Engine:
    places = max(args.requests)
    options = EngineOptions(
        device=args.device,
        dtype=args.dtype,
        seqs_max=places,
        context_max=args.context,
        num_blocks=places * (args.context // 64 + 1) + 64,
        block_tokens=64,
        versions_max=1,
        speculation=mode,  # type: ignore[arg-type]
    )
    engine = Engine(read_spec(args.model), options)
    engine.load(0, args.model)
    for _ in engine.warm_up():
        pass
    return engine


def groups_of(
    args: argparse.Namespace, text: str, prompts: list[tuple[int, ...]], first: int
) -> Any:
    """One list of requests for each prompt."""
    hot = text == "random"
    params = SamplingParams(
        tokens_max=TOKENS_OF[text], temperature=HOT if hot else 1.0, ignore_eos=hot
    )
    return [
        [Request(RequestId(first + i, s), 0, prompt, params, seed=1) for s in range(GROUP)]
        for i, prompt in enumerate(prompts)
    ]


def generate(engine: Engine, groups: list[list[Request]], places: int) -> Rate:
    """Groups one after the other, as they find room."""
    rate, left, num_here = Rate(), list(reversed(groups)), 0
    began = last = time.perf_counter()
    while left or engine.has_work():
        while left and num_here + GROUP <= places:
            for request in left.pop():
                engine.submit(request)
            num_here += GROUP
        was_full = num_here >= FULL * places
        outputs = engine.step()
        now, made = time.perf_counter(), sum(len(output.token_ids) for output in outputs)
        rate.tokens += made
        if was_full:
            rate.full_tokens, rate.full_seconds = (
                rate.full_tokens + made,
                rate.full_seconds + now - last,
            )
        last = now
        for output in outputs:
            if output.trajectory is not None:
                num_here -= 1
                rate.same[output.id] = output.trajectory.token_ids.tolist()
    rate.seconds = time.perf_counter() - began
    return rate


def compare(
    args: argparse.Namespace,
    engines: dict[str, Engine],
    prompts: Iterator[tuple[int, ...]],
    text: str,
    places: int,
) -> dict[str, Any]:
    """One row of the table: both modes with the same prompts in each round, in turns."""
    rates = {mode: Rate() for mode in engines}
    first = getattr(compare, "first", 0)
    number, num_same, num_all = max(6, 3 * places // GROUP), 0, 0
    before = engines["on"].stats().drafts.get(0, (0, 0))
    for index in range(args.rounds + 1):
        some = list(itertools.islice(prompts, number))
        order = list(engines) if index % 2 else list(reversed(engines))
        found = {
            mode: generate(engines[mode], groups_of(args, text, some, first), places)
            for mode in order
        }
        first += number
        if index == 0:
            before = engines["on"].stats().drafts.get(0, (0, 0))
            continue
        for mode, rate in found.items():
            rates[mode].add(rate)
        num_all += len(found["on"].same)
        num_same += sum(found["off"].same[rid] == ids for rid, ids in found["on"].same.items())
    compare.first = first  # type: ignore[attr-defined]
    drafted, accepted = engines["on"].stats().drafts.get(0, (0, 0))
    return {
        "text": text,
        "requests": places,
        "off": rates["off"].all(),
        "on": rates["on"].all(),
        "ratio": rates["on"].all() / rates["off"].all(),
        "full_off": rates["off"].full(),
        "full_on": rates["on"].full(),
        "full_ratio": rates["on"].full() / rates["off"].full(),
        "tokens": rates["on"].tokens,
        "drafted": drafted - before[0],
        "accepted": accepted - before[1],
        "same": num_same / max(1, num_all),
    }


def print_profile(engine: Engine) -> list[Any]:
    guessing = engine.guessing
    if guessing is None:
        return []
    print(f"{'requests':>8} {'rows':>5} {'ms a step':>10} {'tokens':>7} {'relative':>9}")
    rows = guessing.profile()
    plain = {(v, n): seconds for v, n, count, seconds, _ in rows if not count}
    for versions, requests, count, milliseconds, made in rows:
        least = plain.get((versions, requests))
        gain = f"{made * least / milliseconds:>8.2f}x" if least else ""
        shown = count or f"({requests})"
        print(f"{requests:>8} {shown:>5} {milliseconds:>10.3f} {made:>7.2f} {gain}")
    pairs = zip(guessing.right, guessing.tried, strict=True)
    chances = ", ".join(f"{past}: {a / b:.2f}" for past, (a, b) in enumerate(pairs) if b > 1)
    print(f"guesses that were right, by common past: {chances}")
    return rows


def main(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    prompts = prompts_of(args)
    engines = {mode: make_engine(args, mode) for mode in ("off", "on")}
    name = torch.cuda.get_device_name() if args.device != "cpu" else "CPU"
    print(f"{args.model.name} {args.dtype} {name}; ready in {time.perf_counter() - began:.0f} s")
    print(
        f"{'text':>7} {'requests':>8} {'off tok/s':>10} {'on tok/s':>10} {'ratio':>6} "
        f"{'full off':>9} {'full on':>9} {'ratio':>6}  drafted, accepted of tokens; same responses"
    )
    table: list[dict[str, Any]] = []
    for text in args.texts or ["real", "random"]:
        for places in args.requests:
            row = compare(args, engines, prompts, text, places)
            table.append(row)
            print(
                f"{text:>7} {places:>8} {row['off']:>10,.0f} {row['on']:>10,.0f} "
                f"{row['ratio']:>5.2f}x {row['full_off']:>9,.0f} {row['full_on']:>9,.0f} "
                f"{row['full_ratio']:>5.2f}x  {row['drafted']:,}, {row['accepted']:,} of "
                f"{row['tokens']:,}; {row['same']:.0%}   {time.perf_counter() - began:.0f} s",
                flush=True,
            )
        profile = print_profile(engines["on"])
    if args.json:
        found = {"machine": name, "torch": torch.__version__, "rows": table, "profile": profile}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
