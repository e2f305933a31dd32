"""Make a student for distillation: a teacher with fewer neurons in its layers, damaged and tinier.

    python recipes/prune.py recipes/models/tiny --out recipes/models/tinier --neurons 96

Of each layer the neurons with the largest weights stay, as they are. Tokenizer, attention and
embeddings are the teacher's, so every token id means what it means to the teacher.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def pruned(weights: dict[str, Tensor], neurons: int) -> dict[str, Tensor]:
    """By the product of the norms of what goes in and what comes out."""
    out = dict(weights)
    for name in (name for name in weights if name.endswith(".mlp.down_proj.weight")):
        layer = name.removesuffix("down_proj.weight")
        gate, up, down = (f"{layer}{part}_proj.weight" for part in ("gate", "up", "down"))
        norms = (weights[gate].norm(dim=1), weights[up].norm(dim=1), weights[down].norm(dim=0))
        kept = torch.stack(norms).prod(0).topk(neurons).indices.sort().values
        out |= {name: weights[name][kept].contiguous() for name in (gate, up)}
        out[down] = weights[down][:, kept].contiguous()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--neurons", type=int, required=True, help="of each layer")
    args = parser.parse_args()
    shutil.copytree(args.teacher, args.out, ignore=shutil.ignore_patterns("*.safetensors", "*.md"))
    config = json.loads((args.teacher / "config.json").read_text())
    config["intermediate_size"] = args.neurons
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = pruned(load_file(args.teacher / "model.safetensors"), args.neurons)
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    print(f"{args.out}: {sum(tensor.numel() for tensor in weights.values()):,} parameters")


if __name__ == "__main__":
    main()
