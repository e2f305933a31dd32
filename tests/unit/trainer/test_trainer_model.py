"""The packed decoder against transformers' own models, and against one document at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dora_rl.config import TrainerConfig
from dora_rl.model.directory import HfDirectory, write_model
from dora_rl.trainer.attention import Layout, attend_blocks, attend_loop, attend_sdpa
from dora_rl.trainer.checkpoints.publish import compute_canary
from dora_rl.trainer.policy.decoder import rms_norm, rotate
from dora_rl.trainer.policy.logprobs import token_scores
from dora_rl.trainer.policy.model import lean_spec, load_policy, named_weights, pick_device
from dora_rl.types import UserError
from tests.kit.trainer_cases import FAMILIES, VOCAB, write_tiny_model

CPU = torch.device("cpu")
LENGTHS = [7, 20, 33, 1, 21, 9, 20]


def documents(seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    docs = [torch.randint(VOCAB, (n,), generator=g) for n in LENGTHS]
    return docs, torch.randint(VOCAB, (sum(LENGTHS),), generator=g)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_scores_and_gradients_equal_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = write_tiny_model(tmp_path / family, family)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    docs, target = documents()
    table = torch.cat([theirs(d[None]).logits[0].log_softmax(-1) for d in docs])
    want = table.gather(-1, target[:, None]).squeeze(-1)
    want_entropy = -(table.exp() * table).sum(-1)
    ours = load_policy(directory, TrainerConfig(device="cpu", logits_chunk_tokens=13))
    got = ours(torch.cat(docs), Layout(LENGTHS, CPU), torch.arange(len(target)), target)
    assert (got.logprobs_T - want).abs().max() < 1e-5
    assert (got.entropy_T - want_entropy).abs().max() < 1e-5
    weight = torch.linspace(-1, 1, len(target))
    ((got.logprobs_T + 0.3 * got.entropy_T) * weight).sum().backward()
    ((want + 0.3 * want_entropy) * weight).sum().backward()
    mine = {n: p.grad for n, p in ours.named_parameters()}
    for name, p in theirs.named_parameters():
        assert p.grad is not None and mine[name] is not None
        scale = max(1.0, float(p.grad.abs().max()))
        assert (mine[name] - p.grad).abs().max() < 2e-5 * scale, name


def test_packing_changes_nothing(model_dir: Path) -> None:
    policy = load_policy(model_dir, TrainerConfig(device="cpu"))
    docs, target = documents(1)
    with torch.no_grad():
        packed = policy(torch.cat(docs), Layout(LENGTHS, CPU), torch.arange(len(target)), target)
        start, alone = 0, []
        for d in docs:
            n = len(d)
            rows = torch.arange(n)
            alone.append(policy(d, Layout([n], CPU), rows, target[start : start + n]).logprobs_T)
            start += n
    assert (packed.logprobs_T - torch.cat(alone)).abs().max() < 1e-5


def test_foreign_models_are_packed_too(model_dir: Path) -> None:
    docs, target = documents(2)
    args = (torch.cat(docs), Layout(LENGTHS, CPU), torch.arange(len(target)), target)
    lean = load_policy(model_dir, TrainerConfig(device="cpu"))
    other = load_policy(model_dir, TrainerConfig(device="cpu", implementation="transformers"))
    assert (lean(*args).logprobs_T - other(*args).logprobs_T).abs().max() < 1e-5
    assert dict(named_weights(other)).keys() == dict(named_weights(lean)).keys()


def test_checkpointing_changes_nothing(model_dir: Path) -> None:
    docs, target = documents(3)
    grads = []
    for kind in ("none", "layer"):
        policy = load_policy(model_dir, TrainerConfig(device="cpu", activation_checkpointing=kind))
        rows = torch.arange(len(target))
        policy(torch.cat(docs), Layout(LENGTHS, CPU), rows, target).logprobs_T.sum().backward()
        grads.append(torch.cat([p.grad.reshape(-1) for p in policy.parameters()]))  # type: ignore[union-attr]
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("window", [0, 1, 20, 64, 149, 151])
def test_attention_backends_equal_the_loop(heads: tuple[int, int], window: int) -> None:
    lengths = [3, 150, 65, 64, 1, 140, 2]
    layout = Layout(lengths, CPU)
    g = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), h, 8) for h in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(s, generator=g, dtype=torch.float32) for s in shapes]
    outer = torch.randn(shapes[0], generator=g)
    results = []
    for attend in (attend_loop, attend_blocks, attend_sdpa):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = attend(q, k, v, layout, 0.3, window)
        out.backward(outer)
        results.append([out.detach(), q.grad, k.grad, v.grad])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a is not None and b is not None
            assert (a - b).abs().max() < 1e-5


def test_lean_operations_equal_their_plain_form() -> None:
    g = torch.Generator().manual_seed(0)
    x, outer = torch.randn(5, 3, 8, generator=g), torch.randn(5, 3, 8, generator=g)
    w = torch.randn(8, generator=g)
    cos, sin = torch.randn(5, 1, 4, generator=g), torch.randn(5, 1, 4, generator=g)

    def plain_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    def plain_rotation(x: torch.Tensor, _w: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1) + 0 * _w

    cases = (
        (lambda x, w: rms_norm(x, w, 1e-6), plain_norm),
        (lambda x, w: rotate(x, cos, sin) + 0 * w, plain_rotation),
    )
    for lean, plain in cases:
        grads = []
        for f in (lean, plain):
            a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
            out = f(a, b)
            out.backward(outer)
            grads.append((out.detach(), a.grad, b.grad))
        for one, two in zip(*grads, strict=True):
            assert torch.allclose(one, two, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunks_change_nothing(temperature: float) -> None:
    g = torch.Generator().manual_seed(0)
    states, weight = torch.randn(29, 16, generator=g), torch.randn(50, 16, generator=g)
    target = torch.randint(50, (29,), generator=g)
    outer = torch.randn(2, 29, generator=g)
    want = None
    for chunk in (29, 4, 1):
        s, w = states.clone().requires_grad_(), weight.clone().requires_grad_()
        scores = token_scores(s, w, target, temperature, chunk)
        (scores.logprobs_T * outer[0] + scores.entropy_T * outer[1]).sum().backward()
        got = [scores.logprobs_T.detach(), scores.entropy_T.detach(), s.grad, w.grad]
        if want is None:
            s, w = states.clone().requires_grad_(), weight.clone().requires_grad_()
            table = (s @ w.t() / temperature).log_softmax(-1)
            lp = table.gather(-1, target[:, None]).squeeze(-1)
            entropy = -(table.exp() * table).sum(-1)
            (lp * outer[0] + entropy * outer[1]).sum().backward()
            want = [lp.detach(), entropy.detach(), s.grad, w.grad]
        for a, b in zip(got, want, strict=True):
            assert a is not None and b is not None and torch.allclose(a, b, atol=1e-4)


@pytest.mark.full
def test_all_layers_share_one_compiled_body(model_dir: Path) -> None:
    """What is compiled on a GPU has no graph break, and neither another layer nor another number
    of tokens compiles it again. In float64, which takes the GPU's plain formulas on a CPU too."""
    from torch._dynamo.utils import counters

    policy, plain = (
        load_policy(model_dir, TrainerConfig(device="cpu", attention="loop")).double()
        for _ in range(2)
    )
    policy.compute_dtype = plain.compute_dtype = torch.float64
    torch._dynamo.reset()
    counters.clear()
    how = {"dynamic": True, "fullgraph": True, "backend": "aot_eager"}
    for layer in policy.model.layers:  # type: ignore[union-attr]
        layer.fuse(**how)
    docs, target = documents()
    for num in (2, 5, len(docs)):
        ids, lengths = torch.cat(docs[:num]), LENGTHS[:num]
        args = (ids, Layout(lengths, CPU), torch.arange(len(ids)), target[: len(ids)])
        got, want = policy(*args).logprobs_T, plain(*args).logprobs_T
        assert (got - want).abs().max() < 1e-5
        got.sum().backward()
    assert counters["stats"]["unique_graphs"] == 2


def test_the_canary_waits_for_no_compiler(model_dir: Path) -> None:
    """Instances wait for version 0; layers are compiled while the first groups are generated."""
    from torch._dynamo.utils import counters

    policy = load_policy(model_dir, TrainerConfig(device="cpu", compile="on"))
    plain = load_policy(model_dir, TrainerConfig(device="cpu", compile="off"))
    counters.clear()
    canary = compute_canary(policy, policy.vocab, policy.positions_max)
    assert not counters["stats"]["unique_graphs"]
    assert canary == compute_canary(plain, plain.vocab, plain.positions_max)


def test_shards_are_read_back(model_dir: Path, tmp_path: Path) -> None:
    policy = load_policy(model_dir, TrainerConfig(device="cpu"))
    tensors = dict(named_weights(policy))
    files = write_model(tmp_path, tensors.items(), shard_bytes_max=4096)
    assert len(files) > 3
    reader = HfDirectory(tmp_path)
    assert all(torch.equal(reader.tensor(n), t) for n, t in tensors.items())
    with pytest.raises(UserError, match="'nothing' is missing"):
        reader.tensor("nothing")


def test_what_the_lean_decoder_does_not_know_is_refused(model_dir: Path, tmp_path: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    assert lean_spec(config) is not None
    assert lean_spec({**config, "architectures": ["OtherForCausalLM"]}) is None
    assert lean_spec({**config, "use_sliding_window": True}) is None
    assert lean_spec({**config, "rope_parameters": {"rope_type": "yarn"}}) is None
    with pytest.raises(UserError, match=r"no config\.json"):
        load_policy(tmp_path, TrainerConfig(device="cpu"))


def test_wrong_devices_and_names_are_one_clear_error(model_dir: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="sees no GPU"):
            pick_device("cuda")
        with pytest.raises(UserError, match="needs CUDA"):
            load_policy(model_dir, TrainerConfig(attention="varlen"))
    with pytest.raises(UserError, match="did you mean 'loop'"):
        load_policy(model_dir, TrainerConfig(device="cpu", attention="lopp"))
