"""The memory plan against measured peaks: learner, instances and evaluator, each as it is planned.

    python benchmarks/memory.py                                   # all cases, on the GPU here
    python benchmarks/memory.py --case 1.5b,1.5b-lora --device-memory-gb 48 --json memory.json
    python benchmarks/memory.py --case tiny --device cpu          # runs through, measures nothing

Every case is a configuration. It is planned as `dora-rl train` would plan it; then each worker is
built with the planned sizes in a process of its own, alone on the GPU, and works: the learner two
steps of full packs (the second one with its moments), an instance all its requests over all its
versions, the evaluator as many as it answers at once. `measured` is the most that torch's allocator
held, and the CUDA context. Weights and tokens are random. `--device-memory-gb` plans for a smaller
card and enforces it, as `runtime.device_memory_gb` does. Prints a table, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from dora_rl.config import RunConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.models import read_spec
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.random_weights import RandomAdapter, RandomWeights
from dora_rl.engine.sequence import Request
from dora_rl.setup.cards import Card, look_at_cards
from dora_rl.setup.layout import plan_layout
from dora_rl.setup.memory import GB
from dora_rl.setup.plan import DevicePlan, RunPlan, plan_run, planned
from dora_rl.trainer.architecture import read_architecture
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.model import build_decoder, initialise
from dora_rl.trainer.options import TrainerOptions, from_section
from dora_rl.types import Group, RequestId, SamplingParams, Trajectory

PROMPT, NEW, DOCUMENT = 128, 96, 512
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


def plan_case(config: RunConfig, device: str) -> tuple[RunPlan, DevicePlan]:
    """On the first GPU, or on one of 80 GB that is not there."""
    cards = {"0": Card(80 * GB, 80 * GB)} if device == "cpu" else look_at_cards(["0"])
    layout = plan_layout(config, "cuda", tuple(cards))
    plan = plan_run(config, layout, cards)
    assert plan is not None, "every shape here is known"
    layout = planned(layout, plan)
    return plan, plan.devices[0]


# -- in a process of its own ----------------------------------------------------------------------


def run_part(args: argparse.Namespace) -> dict[str, Any]:
    """Build one worker, let it work, say what it took."""
    with tempfile.TemporaryDirectory() as folder:
        config = configure(args.part, Path(folder), args.device_memory_gb)
        plan, device = plan_case(config, args.device)
        if args.device == "cuda" and plan.limit(args.who):
            torch.cuda.set_per_process_memory_fraction(plan.limit(args.who), 0)
        merged = config.model_dump(mode="json")
        for section, values in plan.sizes(args.who).items():
            merged[section] |= values
        config = RunConfig.model_validate(merged)
        if args.who == device.seats.learner:
            notes = work_as_learner(config, device, args.device)
        else:
            notes = work_as_engine(config, device, args)
    return {"notes": notes, **measure(args.device)}


def measure(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"bytes": None, "context_bytes": None, "allocated_bytes": None}
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(0)
    context = total - free - torch.cuda.memory_reserved()  # of a process alone on its GPU
    peak = torch.cuda.max_memory_reserved() + context
    found = {"bytes": peak, "context_bytes": context}
    return found | {"allocated_bytes": torch.cuda.max_memory_allocated() + context}


def work_as_learner(config: RunConfig, planned: DevicePlan, device: str) -> list[str]:
    spec = json.loads((Path(config.model.path) / "config.json").read_text())
    trainer = config.trainer.model_copy(update={"device": device, "compute_dtype": "bfloat16"})
    options = from_section(TrainerOptions, trainer)
    arch = read_architecture(spec)
    assert arch is not None
    half = bool(planned.need.lora_rank) and planned.need.base_bytes == 2
    decoder = build_decoder(arch, options, torch.bfloat16 if half else torch.float32)
    initialise(decoder, seed=0)
    # Ratios of random tokens under random weights are far from 1; nothing is clipped away.
    algorithm = config.algorithm.model_copy(
        update={"clip_low": 0.99, "clip_high": 1e9, "temperature": 1.0}
    )
    learner = Learner(decoder, algorithm, trainer)
    longest = planned.need.request_tokens_max
    lengths = [longest, *[min(DOCUMENT, longest)] * (2 * learner.pack_tokens // DOCUMENT)]
    for step in range(2):
        learner.begin_step(step)
        learner.feed(make_groups(lengths, arch.vocab, step))
        learner.finish_step()
    return learner.notes


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


def work_as_engine(config: RunConfig, planned: DevicePlan, args: argparse.Namespace) -> list[str]:
    spec, rank = read_spec(config.model.path), config.trainer.lora_rank
    is_evaluator = args.who == "evaluator"
    versions = 1 if is_evaluator else planned.memory.versions_max
    rank = 0 if is_evaluator else rank
    values = config.engine_options(args.device, versions)
    values |= {"lora_rank": rank, "versions_max": versions, "dtype": "bfloat16"}
    engine = Engine(spec, EngineOptions(**values))
    if rank:
        engine.load_base(RandomWeights(spec, 0, device=args.device))
    for version in range(versions):
        source: Any = RandomWeights(spec, version, device=args.device)
        if rank:
            source = RandomAdapter(spec, version, rank, args.device)
        engine.load(version, source)
    if args.device == "cuda":  # random weights are made on the device, those of a run are not
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in engine.warm_up():
        pass
    requests = planned.memory.evaluator_requests if is_evaluator else planned.need.num_requests
    params = SamplingParams(tokens_max=NEW, temperature=1.0, ignore_eos=True)
    ids = torch.randint(spec.vocab, (requests, PROMPT), generator=torch.Generator().manual_seed(0))
    for index, prompt in enumerate(ids.tolist()):
        request = Request(RequestId(index, 0), index % versions, tuple(prompt), params)
        engine.submit(request)
    while engine.has_work():
        engine.step()
    return []


# -- the table ------------------------------------------------------------------------------------


def measure_case(case: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = configure(case, Path(folder), args.device_memory_gb)
        plan, device = plan_case(config, args.device)
    for row in plan.table():
        print(row)
    rows: list[dict[str, Any]] = []
    for who in device.seats.names if plan.fits else []:
        row = {"who": who, "planned_bytes": device.memory.of(who), **ask(case, who, args)}
        rows.append(row)
        print(shown(row), flush=True)
    return {"case": case, "fits": plan.fits, "plan": plan.document(), "measured": rows}


def ask(case: str, who: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--part", case, "--who", who, "--device", args.device]
    command += ["--device-memory-gb", str(args.device_memory_gb)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return {"bytes": None, "failed": last[:300]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def shown(row: dict[str, Any]) -> str:
    planned, measured = row["planned_bytes"], row["bytes"]
    if measured is None:
        found = row.get("failed", "not measured here")
    else:
        error = planned / measured - 1
        found = f"measured {measured / GB:7.2f} GB, the plan is {error:+.1%}"
    notes = "".join(f"; {note}" for note in row.get("notes", []))
    return f"{row['who']:<12} planned {planned / GB:7.2f} GB, {found}{notes}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    cases = ",".join(name for name in CASES if name != "tiny")
    parser.add_argument("--case", default=cases, help=f"of {', '.join(CASES)}")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--device-memory-gb", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--who", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(run_part(args)))
        return 0
    found = []
    for case in args.case.split(","):
        print(f"== {case}")
        found.append(measure_case(case, args))
    machine = torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu"
    if args.json:
        document = {"machine": machine, "torch": torch.__version__, "cases": found}
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(case["fits"] for case in found) else 1


if __name__ == "__main__":
    sys.exit(main())
