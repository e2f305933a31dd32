"""How much memory the GPUs of this machine have, and how much of it is free.

Asks the driver's tool, so that the controller never holds a CUDA context of its own for the length
of a run; where the tool is missing, a process that ends again asks torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dora_rl.setup.memory import CONTEXT_BYTES

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
    pairs = json.loads(_said([sys.executable, "-c", _ASK_TORCH]) or "[]")
    # What the asking process itself takes is free for us.
    cards = [Card(total, min(total, free + CONTEXT_BYTES)) for free, total in pairs]
    return dict(zip(gpus, cards, strict=False))


_QUERY = ("--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")


def read_rows(text: str) -> list[tuple[str, str, Card]]:
    """Lines of nvidia-smi: index, UUID, total and free memory in MiB.

    >>> read_rows("0, GPU-5f, 143771, 143160")
    [('0', 'GPU-5f', Card(total_bytes=150754820096, free_bytes=150114140160))]
    """
    rows: list[tuple[str, str, Card]] = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[2].isdigit() and fields[3].isdigit():
            total, free = (int(field) * MIB for field in fields[2:])
            rows.append((fields[0], fields[1], Card(total, free)))
    return rows


def _card_of(gpu: str, rows: Sequence[tuple[str, str, Card]]) -> Card | None:
    """`cuda:1` is the second that there is."""
    name = gpu.removeprefix("cuda:")
    for index, uuid, card in rows:
        if name == index or (not name.isdigit() and uuid.startswith(name)):
            return card
    return None


def _said(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
