"""The GPUs: which ones an instance sees, how much memory they have, and sharing one under MPS.

On a cluster Ray hides the others; here the worker is told their names before it touches CUDA. The
learner's ranks have the first GPUs. An instance gets the next one, then one after the other as long
as there are any, and shares one where there are fewer; instances that sleep while the learner
computes sit on its GPUs too. An instance of several GPUs has them to itself. The memory of this
machine's GPUs is divided by their plan (setup/plan.py); the fixed shares here are for where nothing
is known of a GPU before a worker is on it.

How much memory there is and how much is free is asked of the driver's tool, so that the controller
never holds a CUDA context of its own; where the tool is missing, a process that ends again asks
torch.

MPS is NVIDIA's multi-process service. Without it the driver gives the device to one process at a
time (decoding and training together then reach 0.93 of what each does alone); with it their kernels
run side by side (1.10). The price: a fault on the device in one process ends all of them, and the
run goes on from its journals. So it is asked for (`runtime.mps`), never assumed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

from dora_rl.config import RunConfig
from dora_rl.setup.memory import CONTEXT_BYTES
from dora_rl.types import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
LEARNER_SHARE = 0.5  # of a GPU, where instances are on it too
EVALUATOR_SHARE = 0.1  # of the GPU of the learner's first rank
INSTANCES_SHARE = 1.0 - LEARNER_SHARE - EVALUATOR_SHARE  # together, of a GPU of the learner's


@dataclass(frozen=True, slots=True)
class Place:
    """What an instance sees, and its share of the memory for weights and KV cache."""

    gpus: tuple[str, ...] = ()  # none: what the controller sees
    memory_share: float = 1.0


def visible_gpus() -> tuple[str, ...]:
    """The GPUs of this process, as CUDA is told them."""
    if (told := os.environ.get(VISIBLE)) is not None:
        return tuple(name.strip() for name in told.split(",") if name.strip())
    import torch

    return tuple(map(str, range(torch.cuda.device_count())))


def local_places(
    config: RunConfig,
    device: str,
    instances: Sequence[str],
    elastic: Sequence[str],
    gpus: Sequence[str] | None = None,
) -> dict[str, Place]:
    """On this machine. A device with a number ("cuda:1") is the one GPU of the whole run."""
    if gpus is None:
        gpus = visible_gpus() if device != "cpu" else ()
    if not gpus:
        return {}
    if ":" not in device:
        return place_instances(config, instances, elastic, gpus)
    found = place_instances(config, instances, elastic, [device])
    return {name: Place((), place.memory_share) for name, place in found.items()}


def place_instances(
    config: RunConfig, instances: Sequence[str], elastic: Sequence[str], gpus: Sequence[str]
) -> dict[str, Place]:
    """`elastic` are those of the instances that sleep while the learner computes."""
    ranks = config.resources.learner_ranks
    if ranks > len(gpus):
        raise UserError(
            f"resources.learner_ranks = {ranks}: every rank needs a GPU, {len(gpus)} are visible"
        )
    if config.resources.devices_per_instance > 1:
        return _place_wide(config, instances, gpus)
    learners, others = gpus[:ranks], gpus[ranks:]
    all_sleep = len(elastic) == len(instances)
    beside, apart = cycle(gpus if all_sleep else learners), cycle(others or learners)
    chosen = {name: next(beside if name in elastic else apart) for name in instances}
    shares = {
        gpu: (INSTANCES_SHARE if gpu in learners else 1.0) / count
        for gpu, count in Counter(chosen.values()).items()
    }
    return {name: Place((gpu,), shares[gpu]) for name, gpu in chosen.items()}


def shared_place(elastic: bool) -> Place:
    """Where a cluster decides on the device: how much of its memory."""
    return Place(memory_share=INSTANCES_SHARE if elastic else 1.0)


def _place_wide(
    config: RunConfig, instances: Sequence[str], gpus: Sequence[str]
) -> dict[str, Place]:
    each, first = config.resources.devices_per_instance, config.resources.learner_ranks
    if (wanted := first + each * len(instances)) > len(gpus):
        raise UserError(
            f"resources.devices_per_instance = {each}: {len(instances)} instances and {first} "
            f"learner ranks need {wanted} GPUs, {len(gpus)} are visible; lower "
            "rollout.num_instances or run on a cluster (runtime.world = ray)"
        )
    own = (tuple(gpus[at : at + each]) for at in range(first, wanted, each))
    return {name: Place(gpus) for name, gpus in zip(instances, own, strict=True)}


MIB = 1 << 20
_ASK_TORCH = """
import json, torch
print(json.dumps([torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count())]))
"""


@dataclass(frozen=True, slots=True)
class Card:
    """The memory of one GPU."""

    total_bytes: int
    free_bytes: int


def look_at_cards(gpus: Sequence[str]) -> dict[str, Card]:
    """By the names of `CUDA_VISIBLE_DEVICES`: numbers, or the beginning of a UUID. What cannot be
    found out is left out."""
    rows = read_rows(_said(["nvidia-smi", *_QUERY]))
    found = {gpu: card for gpu in gpus if (card := _card_of(gpu, rows)) is not None}
    if len(found) == len(gpus):
        return found
    pairs = json.loads(_said([sys.executable, "-P", "-c", _ASK_TORCH]) or "[]")
    # What the asking process itself takes is free for us.
    cards = [Card(total, min(total, free + CONTEXT_BYTES)) for free, total in pairs]
    return dict(zip(gpus, cards, strict=False))


_QUERY = ("--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")


def read_rows(text: str) -> list[tuple[str, str, Card]]:
    """Lines of nvidia-smi: index, UUID, total and free memory in MiB.

    >>> read_rows("0, GPU-5f, 143771, 143160")
    [('0', 'GPU-5f', Card(total_bytes=150754820096, free_bytes=150114140160))]
    """
    lines = ([field.strip() for field in line.split(",")] for line in text.splitlines())
    return [
        (index, uuid, Card(int(total) * MIB, int(free) * MIB))
        for index, uuid, total, free in (fields for fields in lines if len(fields) == 4)
        if total.isdigit() and free.isdigit()
    ]


def _card_of(gpu: str, rows: Sequence[tuple[str, str, Card]]) -> Card | None:
    """`cuda:1` is the second that there is."""
    name = gpu.removeprefix("cuda:")
    return next(
        (
            card
            for index, uuid, card in rows
            if name == index or (not name.isdigit() and uuid.startswith(name))
        ),
        None,
    )


def _said(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


CONTROL = "nvidia-cuda-mps-control"
# Read when a process first touches CUDA.
PERCENT = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PRIORITY = "CUDA_MPS_CLIENT_PRIORITY"
BELOW_NORMAL = "1"
MPS_FOLDERS = {"CUDA_MPS_PIPE_DIRECTORY": "pipe", "CUDA_MPS_LOG_DIRECTORY": "log"}


class Mps:
    """A daemon of the run's own; processes started while it lives are its clients."""

    def __init__(self) -> None:
        if shutil.which(CONTROL) is None:
            raise UserError(f"runtime.mps: {CONTROL} is not installed; set runtime.mps = false")
        self._folder = tempfile.mkdtemp(prefix="dora-rl-mps-")
        self._before = {name: os.environ[name] for name in MPS_FOLDERS if name in os.environ}
        for name, part in MPS_FOLDERS.items():
            os.environ[name] = os.path.join(self._folder, part)
            os.mkdir(os.environ[name])
        # The daemon counts the GPUs anew from those it sees; workers name them as we do.
        env = {name: value for name, value in os.environ.items() if name != VISIBLE}
        done = subprocess.run([CONTROL, "-d"], capture_output=True, text=True, env=env)
        if done.returncode != 0:
            self.end()
            raise UserError(f"runtime.mps: {CONTROL} did not start: {done.stderr.strip()}")

    def end(self) -> None:
        subprocess.run([CONTROL], input="quit\n", capture_output=True, text=True, timeout=30)
        for name in MPS_FOLDERS:
            os.environ.pop(name, None)
        os.environ |= self._before
        shutil.rmtree(self._folder, ignore_errors=True)
