"""The memory plan against measured peaks, line by line: learner, instances and evaluator.

    python benchmarks/memory.py --json memory.json                # six configurations, one GPU
    python benchmarks/memory.py --case 1.5b-lora,0.6b --device-memory-gb 24 --ballast-gb rest
    python benchmarks/memory.py --case tiny --device cpu          # runs through, measures nothing

Every case is a configuration. It is planned as `dora-rl train` would plan it; then each worker is
built with the planned sizes in a process of its own, all of them at once on the GPU, and works: the
learner three steps of full packs of several sizes and a frozen version to score under, an instance
all its requests over all its versions, the evaluator as many as it answers at once. `measured` is
what torch's allocator held at the peak of each phase; the CUDA context is measured once, alone.
Weights and tokens are random. `--device-memory-gb` plans for a smaller card and enforces it, as
`runtime.device_memory_gb` does; `--ballast-gb` has another process hold so much of the card, or the
`rest` of it, so that what fits was proven. A worker or a case that fails is shown, and the others
go on; the JSON is written after every case. Prints a table, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dora_rl.config import RunConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import read_spec
from dora_rl.model.random_weights import RandomAdapter, RandomWeights
from dora_rl.setup.devices import Card, look_at_cards
from dora_rl.setup.layout import plan_layout
from dora_rl.setup.memory import CONTEXT_BYTES, GB, shelf_bytes
from dora_rl.setup.plan import DevicePlan, RunPlan, plan_run, planned
from dora_rl.trainer.documents import documents_of
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.policy.decoder import Decoder
from dora_rl.trainer.policy.model import build_decoder, lean_spec
from dora_rl.trainer.scoring import score
from dora_rl.types import Group, RequestId, SamplingParams, Trajectory
from dora_rl.weights.handover import Shelf
from dora_rl.workers.worker import grow_in_place

PROMPT, NEW = 128, 96
DOCUMENTS = (512, 448, 576)  # tokens, step by step: packs of a run differ in size too
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151_936}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
COMMON = {
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}


def shape(family: dict[str, Any], *sizes: int, **more: Any) -> dict[str, Any]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    keys = (*names, "num_key_value_heads", "head_dim")
    return COMMON | family | dict(zip(keys, sizes, strict=True)) | more


SHAPES = {
    "tiny": shape(QWEN3, 64, 128, 2, 4, 2, 16, vocab_size=512),
    "135m": shape(LLAMA, 576, 1536, 30, 9, 3, 64, vocab_size=49_152),
    "0.6b": shape(QWEN3, 1024, 3072, 28, 16, 8, 128),
    "1.5b": shape(QWEN2, 1536, 8960, 28, 12, 2, 128),
}
GSM8K = {"tokens_max": 768, "seqs_max": 768, "step_tokens_max": 8192}
LONG = {"tokens_max": 16_384, "seqs_max": 64, "step_tokens_max": 8192}
# Shape, [rollout], [trainer], groups of a batch.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "tiny": ("tiny", {"tokens_max": 64, "seqs_max": 16}, {}, 2),
    "135m": ("135m", GSM8K, {}, 64),
    "0.6b": ("0.6b", GSM8K, {}, 64),
    "1.5b": ("1.5b", GSM8K, {}, 64),
    "1.5b-lora": ("1.5b", GSM8K, {"lora_rank": 32}, 64),
    "long": ("0.6b", LONG, {}, 8),
    "two": ("1.5b", GSM8K | {"num_instances": 2, "seqs_max": 384}, {}, 64),
}


def configure(case: str, folder: Path, device_memory_gb: float) -> RunConfig:
    """The configuration of a case, with the model's shape in a directory of its own."""
    name, rollout, trainer, groups = CASES[case]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"train": ["made up"], "eval": ["made up"], "prompt_tokens_max": 512},
            "rollout": rollout,
            "trainer": trainer,
            "orchestration": {"batch_groups": groups},
            "runtime": {"device_memory_gb": device_memory_gb, "run_dir": str(folder / "run")},
        }
    )


def plan_case(config: RunConfig, total_bytes: int) -> tuple[RunPlan, DevicePlan]:
    """On one card of this size that nobody else uses; what ballast holds is not to be planned."""
    cards = {"0": Card(total_bytes, total_bytes)}
    layout = plan_layout(config, "cuda", tuple(cards))
    plan = plan_run(config, layout, cards)
    assert plan is not None, "every shape here is known"
    layout = planned(layout, plan)
    return plan, plan.devices[0]


# -- in a process of its own ----------------------------------------------------------------------


class Phases:
    """What the allocator held, phase by phase. On a CPU nothing is known."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self.found: dict[str, int | None] = {}

    def now(self, name: str) -> None:
        """In use at this moment."""
        if self._on_gpu:
            torch.cuda.synchronize()
        self.found[name] = torch.cuda.memory_allocated() if self._on_gpu else None

    def begin(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self, name: str) -> None:
        """Since `begin`: in use, and held with what lies between."""
        stats = torch.cuda.memory_stats() if self._on_gpu else {}
        self.found[name] = stats.get("allocated_bytes.all.peak")
        self.found[f"{name}, held"] = stats.get("reserved_bytes.all.peak")

    def put(self, name: str, num_bytes: int) -> None:
        self.found[name] = num_bytes if self._on_gpu else None


def run_part(args: argparse.Namespace) -> dict[str, Any]:
    """Build one worker, let it work, say what it took."""
    phases, began_s = Phases(args.device), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        config = configure(args.part, Path(folder), args.device_memory_gb)
        plan, device = plan_case(config, args.card_bytes)
        is_learner = args.who == device.seats.learner
        if args.device == "cuda" and is_learner:
            grow_in_place()
        if args.device == "cuda" and plan.limit(args.who):
            torch.cuda.set_per_process_memory_fraction(plan.limit(args.who), 0)
        merged = config.model_dump(mode="json")
        for section, values in plan.sizes(args.who).items():
            merged[section] |= values
        config = RunConfig.model_validate(merged)
        if is_learner:
            notes = work_as_learner(config, device, args.device, phases)
        else:
            notes = work_as_engine(config, device, args, phases)
    wall_s = round(time.monotonic() - began_s, 1)
    return {"notes": notes, "phases": phases.found, "wall_s": wall_s}


@torch.no_grad()
def randomise(decoder: Decoder) -> None:
    """In place: nothing else is allocated."""
    for p in decoder.parameters():
        p.normal_(0.0, 0.02)


def work_as_learner(
    config: RunConfig, planned: DevicePlan, device: str, phases: Phases
) -> list[str]:
    spec = json.loads((Path(config.model.path) / "config.json").read_text())
    trainer = config.trainer.model_copy(update={"device": device, "compute_dtype": "bfloat16"})
    options = trainer
    arch = lean_spec(spec)
    assert arch is not None
    half = bool(planned.need.lora_rank) and planned.need.base_bytes == 2
    decoder = build_decoder(arch, options, torch.bfloat16 if half else torch.float32)
    randomise(decoder)
    base = sum(p.nbytes for p in decoder.parameters())
    # Ratios of random tokens under random weights are far from 1; nothing is clipped away.
    algorithm = config.algorithm.model_copy(
        update={"clip_low": 0.99, "clip_high": 1e9, "temperature": 1.0}
    )
    learner = Learner(decoder, algorithm, trainer)
    trained = sum(p.nbytes for p in learner.optimizer.parameters)
    phases.put("frozen base", base if planned.need.lora_rank else 0)
    phases.put("masters", trained)
    phases.put("handover", hold_version(config, learner))
    longest = planned.need.request_tokens_max
    groups: list[Group] = []
    for step, usual in enumerate(DOCUMENTS):
        if step < 2:  # the first one has no moments yet, and compiles
            phases.begin()
        learner.begin_step(step)
        count = 2 * learner.pack_tokens // usual
        groups = make_groups([longest, *[min(usual, longest)] * count], arch.vocab, step)
        learner.feed(groups)
        gradients = [p.grad for p in learner.optimizer.parameters if p.grad is not None]
        phases.put("gradients", sum(gradient.nbytes for gradient in gradients))
        del gradients
        learner.finish_step()
        phases.peak("pack")
    moments = learner.optimizer.state_tensors().values()
    phases.put("moments", sum(t.nbytes for t in moments))
    if planned.need.rechecks:
        phases.begin()
        twin = learner.scorer.make_adapted() if options.lora_rank else learner.scorer.make_twin()
        assert isinstance(twin, Decoder)
        randomise(twin)
        documents = [d for g in groups for s in g.samples for d in documents_of(g, s, 0.0)]
        score(twin, documents, 1.0, learner.pack_tokens)
        phases.peak("frozen version")
    return learner.notes


def hold_version(config: RunConfig, learner: Learner) -> int:
    """As instances on this device take it over; torch's allocator knows nothing of it."""
    if config.weights.handover is not True or learner.device.type != "cuda":
        return 0
    params = sum(p.numel() for p in learner.policy.parameters())
    with tempfile.TemporaryDirectory() as folder:
        size = shelf_bytes(params, learner.published_dtype.itemsize)
        return Shelf(Path(folder), size).num_bytes


def make_groups(lengths: list[int], vocab: int, version: int) -> list[Group]:
    """Pairs of random responses, one of them right, so that every one has a gradient."""
    generator = torch.Generator().manual_seed(0)
    made: list[Group] = []
    lengths = lengths + lengths[-1:] * (len(lengths) % 2)
    for at in range(0, len(lengths), 2):
        ids = [
            torch.randint(vocab, (n - 8,), generator=generator).tolist() for n in lengths[at:][:2]
        ]
        samples = tuple(
            Trajectory(
                RequestId(at, place),
                version,
                words,
                [-math.log(vocab)] * len(words),
                [1] * len(words),
                reward=float(place),
            )
            for place, words in enumerate(ids)
        )
        made.append(Group(at, version, list(range(8)), samples))
    return made


def work_as_engine(
    config: RunConfig, planned: DevicePlan, args: argparse.Namespace, phases: Phases
) -> list[str]:
    spec, rank = read_spec(config.model.path), config.trainer.lora_rank
    is_evaluator = args.who == "evaluator"
    versions = 1 if is_evaluator else planned.memory.versions_max
    rank = 0 if is_evaluator else rank
    values = config.engine_options(args.device, versions)
    values |= {"lora_rank": rank, "versions_max": versions, "dtype": "bfloat16"}
    engine = Engine(spec, EngineOptions(**values))
    phases.put("KV", engine.runner.cache.kv.nbytes)
    phases.now("weights and KV")  # slots are made at once, and filled
    kind = torch.bfloat16  # in float32 they would take more room than those of a run
    if rank:
        engine.load_base(RandomWeights(spec, 0, device=args.device, dtype=kind))
    for version in range(versions):
        whole = RandomWeights(spec, version, device=args.device, dtype=kind)
        engine.load(version, RandomAdapter(spec, version, rank, args.device) if rank else whole)
        del whole
    phases.begin()  # random weights are made on the device, those of a run are not
    for _ in engine.warm_up():
        pass
    requests = engine.options.seqs_max
    if not is_evaluator:
        requests = min(planned.need.num_requests, requests)
    params = SamplingParams(tokens_max=NEW, temperature=1.0, ignore_eos=True)
    ids = torch.randint(spec.vocab, (requests, PROMPT), generator=torch.Generator().manual_seed(0))
    for index, prompt in enumerate(ids.tolist()):
        request = Request(RequestId(index, 0), index % versions, tuple(prompt), params)
        engine.submit(request)
    while engine.has_work():
        engine.step()
    phases.peak("work")
    return engine.notes


def show_context() -> dict[str, Any]:
    """Of a process alone on its GPU that has multiplied once."""
    ones = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16)
    (ones @ ones).sum().item()
    free, total = torch.cuda.mem_get_info(0)
    return {"context_bytes": total - free - torch.cuda.memory_reserved()}


def hold_ballast(num_bytes: int) -> None:
    """Until standard input ends."""
    size = max(0, num_bytes - CONTEXT_BYTES)
    held = torch.zeros(size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    print(json.dumps({"held": held.nbytes}), flush=True)
    sys.stdin.read()


# -- the table ------------------------------------------------------------------------------------


def lines_of(
    device: DevicePlan, who: str, found: dict[str, Any], context: int | None
) -> list[dict[str, Any]]:
    """A row for each line of the plan that this worker has, and one for all of them."""
    phases: dict[str, int | None] = found.get("phases", {})
    rows = [
        {"who": who, "what": line.what, "planned": line.num_bytes}
        | {"measured": measured(line.what, phases, context)}
        for line in device.memory.lines
        if line.who == who
    ]
    held = [phases.get(f"{name}, held") for name in ("pack", "frozen version", "work")]
    known = [each for each in held if each is not None]
    whole = max(known) + (phases.get("handover") or 0) + (context or 0) if known else None
    rows.append({"who": who, "what": "all", "planned": device.memory.of(who), "measured": whole})
    return rows


def measured(what: str, phases: dict[str, int | None], context: int | None) -> int | None:
    """What a line of the plan came to; None: not known."""

    def less(total: str, *parts: str) -> int | None:
        values = [phases.get(name) for name in (total, *parts)]
        if any(value is None for value in values):
            return None
        first, *others = (int(value or 0) for value in values)
        return first - sum(others)

    state = ("frozen base", "masters", "gradients", "moments")
    if what == "context":
        return context
    if what.startswith("a pack"):
        return less("pack", *state)
    if what.startswith("a frozen version"):
        return less("frozen version", *state)
    if what.startswith("the version"):
        return phases.get("handover")
    if what.startswith("graphs"):
        return less("work, held", "weights and KV")
    if what.startswith(("weights", "base")):
        return less("weights and KV", "KV")
    names = ("masters", "gradients", "moments", "frozen base", "KV")
    return next((phases.get(name) for name in names if what.startswith(name)), None)


def shown(row: dict[str, Any]) -> str:
    size, real = row["planned"] / GB, row["measured"]
    start = f"{row['who']:<12} {row['what']:<48} {size:8.2f}"
    if not real:
        return f"{start} {'-' if real is None else '0.00':>9} {'-':>6}"
    return f"{start} {real / GB:9.2f} {row['planned'] / real:6.2f}"


HEAD = f"{'':<12} {'GB':<48} {'planned':>8} {'measured':>9} {'ratio':>6}"


def measure_case(case: str, args: argparse.Namespace, context: int | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = configure(case, Path(folder), args.device_memory_gb)
        plan, device = plan_case(config, args.card_bytes)
    result = {"case": case, "fits": plan.fits, "plan": plan.document(), "workers": {}, "lines": []}
    if not plan.fits:
        print("\n".join([*plan.table(), "does not fit: not measured"]), flush=True)
        return result
    names = device.seats.names
    running = {who: begin_part(case, who, args) for who in names}
    print(HEAD)
    for who in names:
        found = result["workers"][who] = end_part(running[who], args.timeout_s)
        rows = lines_of(device, who, found, context)
        result["lines"] += rows
        print("\n".join(map(shown, rows)), flush=True)
        for note in (*found.get("notes", []), *([found["failed"]] if "failed" in found else [])):
            print(f"{who:<12} {note}", flush=True)
    return result


def command_of(args: argparse.Namespace, *words: str) -> list[str]:
    command = [sys.executable, __file__, *words, "--device", args.device]
    command += ["--card-bytes", str(args.card_bytes)]
    return [*command, "--device-memory-gb", str(args.device_memory_gb)]


def begin_part(case: str, who: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    command = command_of(args, "--part", case, "--who", who)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end_part(process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"failed": f"had not ended after {timeout_s:g} s"}
    if process.returncode:
        last = (err.strip().splitlines() or [f"status {process.returncode}"])[-1]
        return {"failed": last[:300]}
    return json.loads(out.strip().splitlines()[-1])


def begin_ballast(args: argparse.Namespace) -> subprocess.Popen[str] | None:
    """Holds what it is told to, or all that the smaller card does not have."""
    if args.ballast_gb == "rest":
        assert args.device_memory_gb, "--ballast-gb rest needs --device-memory-gb"
        size = args.card_bytes - int(args.device_memory_gb * GB)
    else:
        size = int(float(args.ballast_gb) * GB)
    if size <= 0 or args.device == "cpu":
        return None
    command = command_of(args, "--hold", str(size))
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    said = process.stdout.readline()
    assert said, "the ballast could not be taken"
    print(f"ballast: {json.loads(said)['held'] / GB:.1f} GB of {args.card_bytes / GB:.1f}")
    return process


def ask_context(args: argparse.Namespace) -> int | None:
    if args.device == "cpu":
        return None
    command = command_of(args, "--context")
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    return end_part(process, args.timeout_s).get("context_bytes")


def measure_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    began_s, cases = time.monotonic(), list[dict[str, Any]]()
    context = ask_context(args)
    ballast = begin_ballast(args)
    try:
        for case in args.case.split(","):
            print(f"== {case}", flush=True)
            if time.monotonic() - began_s > args.budget_s:
                cases.append({"case": case, "failed": "not begun: --budget-s is over"})
                print(cases[-1]["failed"])
                continue
            cases.append(measure_case(case, args, context))
            if args.json:
                args.json.write_text(json.dumps(document_of_run(args, cases), indent=1) + "\n")
    finally:
        if ballast is not None:
            ballast.communicate()  # ends its input, and with that the process
    if args.json:
        args.json.write_text(json.dumps(document_of_run(args, cases), indent=1) + "\n")
    return cases


def document_of_run(args: argparse.Namespace, cases: list[dict[str, Any]]) -> dict[str, Any]:
    about = {"device": args.device, "torch": torch.__version__, "card_bytes": args.card_bytes}
    about |= {"device_memory_gb": args.device_memory_gb, "ballast_gb": args.ballast_gb}
    return about | {"cases": cases}


def has_failed(case: dict[str, Any]) -> bool:
    workers = case.get("workers", {}).values()
    return not case.get("fits") or any("failed" in found for found in workers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    cases = ",".join(name for name in CASES if name != "tiny")
    parser.add_argument("--case", default=cases, help=f"of {', '.join(CASES)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--device-memory-gb", type=float, default=0.0)
    parser.add_argument("--ballast-gb", default="0", help="a number, or rest")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of one worker")
    parser.add_argument("--budget-s", type=float, default=270.0, help="no case begins after that")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--card-bytes", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--who", help=argparse.SUPPRESS)
    parser.add_argument("--context", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--hold", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hold is not None:
        hold_ballast(args.hold)
        return 0
    if args.part or args.context:
        print(json.dumps(run_part(args) if args.part else show_context()))
        return 0
    if not args.card_bytes:
        cards = {} if args.device == "cpu" else look_at_cards(["0"])
        args.card_bytes = cards["0"].total_bytes if cards else 80 * GB
    return 1 if any(map(has_failed, measure_all(args))) else 0


if __name__ == "__main__":
    sys.exit(main())
