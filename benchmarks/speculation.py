"""What drafts gain on a CPU: decode tokens/s with `rollout.speculation` auto and on, against off.

    python benchmarks/speculation.py
    python benchmarks/speculation.py --texts digits --requests 1,8 --rounds 3 --json drafts.json

Three texts. `digits`: the warm model of the quick start on its task, groups of 8, as a run decodes
them. `loops`: random weights of a larger model at temperature 0, which repeat themselves soon.
`random`: the same weights at temperature 1 say anything: nothing can be guessed, and what looking
costs is all there is to see. So many requests run at once, and new ones follow as others end. The
engines take turns with other prompts in each round; the first round warms up. Shown is the ratio of
all their tokens/s. That all three say the same is checked.

    python benchmarks/speculation.py --model DIR --prompts FILE.jsonl

On a GPU, with a real model: see `speculation_gpu.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dora_rl.data.tasks import Chains
from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import read_spec
from dora_rl.model.random_weights import RandomWeights
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.types import RequestId, SamplingParams
from engine import SHAPES
from speculation_gpu import main as compare_on_gpu

MODES = ("off", "auto", "on")
TEXTS = ("digits", "loops", "random")
TINY = Path(__file__).parent.parent / "recipes" / "models" / "tiny"
GROUP = 8


def make_engine(text: str, mode: str, num_requests: int) -> Engine:
    """A fresh one, for this many requests at once."""
    spec = read_spec(TINY) if text == "digits" else SHAPES["tiny"]
    options = EngineOptions(
        seqs_max=num_requests,
        block_tokens=64,
        num_blocks=num_requests * 10 + 64,
        context_max=512,
        versions_max=1,
        speculation=mode,  # type: ignore[arg-type]
    )
    engine = Engine(spec, options)
    engine.load(0, TINY if text == "digits" else RandomWeights(spec, 0))
    return engine


def prompts_of(text: str) -> Callable[[int], tuple[int, ...]]:
    """The prompt of each group."""
    if text == "digits":
        chains, tokenizer = Chains(num_steps_median=30.0), open_tokenizer(TINY, False)
        return lambda group: tuple(tokenizer.encode(chains.row(0, group, "train")["prompt"]))

    def random_prompt(group: int) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(group)
        return tuple(torch.randint(0, SHAPES["tiny"].vocab, (64,), generator=generator).tolist())

    return random_prompt


def requests_of(text: str, first_group: int, count: int, tokens: int) -> list[Request]:
    prompt, params = prompts_of(text), SamplingParams(tokens_max=tokens)
    if text != "digits":
        heat = 0.0 if text == "loops" else 1.0
        params = SamplingParams(tokens_max=tokens, temperature=heat, ignore_eos=True)
    each = GROUP if text == "digits" else 1  # greedy samples of a group would be the same
    return [
        Request(
            RequestId(first_group + i // each, i % each), 0, prompt(first_group + i // each), params
        )
        for i in range(count)
    ]


def generate(engine: Engine, requests: list[Request]) -> tuple[float, int, dict[RequestId, Any]]:
    """Seconds, tokens, and what was said."""
    began, done = time.process_time(), {}
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        for output in engine.step():
            if output.trajectory is not None:
                done[output.id] = output.trajectory
    took_s = time.process_time() - began
    return took_s, sum(len(t.token_ids) for t in done.values()), done


def compare(text: str, num_requests: int, rounds: int, tokens: int) -> dict[str, Any]:
    engines = {mode: make_engine(text, mode, num_requests) for mode in MODES}
    count = max(GROUP, 2 * num_requests)
    seconds, num_tokens = dict.fromkeys(MODES, 0.0), dict.fromkeys(MODES, 0)
    for index in range(rounds + 1):
        requests = requests_of(text, index * count, count, tokens)
        order = MODES[index % 3 :] + MODES[: index % 3]
        found = {mode: generate(engines[mode], requests) for mode in order}
        assert all(found[mode][2] == found["off"][2] for mode in MODES), "a response differs"
        for mode, (took_s, made, _) in found.items():
            seconds[mode] += took_s * (index > 0)
            num_tokens[mode] += made * (index > 0)
    rate = {mode: num_tokens[mode] / seconds[mode] for mode in MODES}
    row: dict[str, Any] = {"text": text, "requests": num_requests, "tokens_per_s": rate["off"]}
    for mode in MODES[1:]:
        drafts = engines[mode].stats().drafts.get(0, (0, 0))
        row[mode] = rate[mode] / rate["off"]
        row[f"{mode}_drafted"], row[f"{mode}_accepted"] = drafts
    return row


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--texts", type=lambda text: text.split(","), default=[])
    parser.add_argument("--requests", default="")
    parser.add_argument("--rounds", type=int, default=2, help="counted, after one to warm up")
    parser.add_argument("--tokens", type=int, default=384, help="of a response at most")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, help="a model directory; the others are for it")
    parser.add_argument("--prompts", type=Path, help="a jsonl file")
    parser.add_argument("--column", default="question", help="of the prompts")
    parser.add_argument("--rows", type=int, default=4000, help="of the file, at most")
    parser.add_argument("--context", type=int, default=1152)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args(argv)
    args.requests = args.requests or ("8,32,128" if args.model else "1,8,32,128")
    if args.model:
        args.requests = list(map(int, args.requests.split(",")))
        compare_on_gpu(args)
        return
    torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    print(f"{'text':>8} {'requests':>8} {'off tok/s':>10} {'auto':>6} {'on':>6}  drafted, accepted")
    for text in args.texts or TEXTS:
        for num_requests in map(int, args.requests.split(",")):
            row = compare(text, num_requests, args.rounds, args.tokens)
            rows.append(row)
            print(
                f"{text:>8} {num_requests:>8} {row['tokens_per_s']:>10,.0f} {row['auto']:>5.2f}x "
                f"{row['on']:>5.2f}x  auto {row['auto_drafted']:,}, {row['auto_accepted']:,}; "
                f"on {row['on_drafted']:,}, {row['on_accepted']:,}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
