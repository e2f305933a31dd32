"""Models run through transformers compute what transformers computes, or are refused in one line.

The reference is the plain model: float32, eager attention, one document at a time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.model.directory import write_model
from dora_rl.trainer.attention import Layout
from dora_rl.trainer.checkpoints.publish import Publisher
from dora_rl.trainer.foreign.check import DIFFERENCE_MAX, WINDOW, _smaller, load_foreign
from dora_rl.trainer.foreign.policy import ForeignPolicy
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.policy.logprobs import TokenScores
from dora_rl.trainer.policy.lora import add_lora
from dora_rl.trainer.policy.model import (
    Policy,
    clone_architecture,
    load_policy,
    load_weights,
    named_weights,
    stored_weights,
)
from dora_rl.types import UserError
from tests.kit.places import ROOT
from tests.kit.trainer_cases import VOCAB as TINY_VOCAB
from tests.kit.trainer_cases import flat, make_groups, write_tiny_model
from tests.kit.trainer_store import MemoryStore
from tests.unit.trainer.foreign_families import (
    FAMILIES,
    FAST,
    FLOAT32_ONLY,
    REFUSED,
    VOCAB,
    make_config,
    table,
    write_family,
)

CPU = torch.device("cpu")
OPTIONS = TrainerConfig(device="cpu", implementation="transformers", logits_chunk_tokens=13)
LENGTHS = [25, 24, 6, 1, 30, 26]
DOCS = ROOT / "docs"
CASES = [f if f in FAST else pytest.param(f, marks=pytest.mark.full) for f in FAMILIES]


def documents(seed: int = 0) -> tuple[list[Tensor], Tensor]:
    g = torch.Generator().manual_seed(seed)
    docs = [torch.randint(VOCAB, (n,), generator=g) for n in LENGTHS]
    return docs, torch.randint(VOCAB, (sum(LENGTHS),), generator=g)


def run(policy: Any, docs: list[Tensor], target: Tensor) -> TokenScores:
    layout = Layout([len(d) for d in docs], target.device)
    rows = torch.arange(layout.num_tokens, device=target.device)
    return policy(torch.cat(docs), layout, rows, target)


def plain_model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def plain_scores(model: Any, docs: list[Tensor], target: Tensor) -> TokenScores:
    logprobs = torch.cat(
        [model(input_ids=d[None], use_cache=False).logits[0].log_softmax(-1) for d in docs]
    )
    chosen = logprobs.gather(-1, target[:, None]).squeeze(-1)
    return TokenScores(chosen, -(logprobs.exp() * logprobs).sum(-1))


def assert_near(got: TokenScores, want: TokenScores, limit: float = 1e-4) -> None:
    assert (got.logprobs_T - want.logprobs_T).abs().max() < limit
    assert (got.entropy_T - want.entropy_T).abs().max() < limit


@pytest.mark.parametrize("family", CASES)
def test_a_family_computes_and_exports_what_transformers_does(family: str, tmp_path: Path) -> None:
    """Alone, packed, its gradients, and what transformers reads back after the weights moved."""
    directory = write_family(tmp_path / "model", family)
    theirs = plain_model(directory)
    ours = load_policy(directory, OPTIONS)
    assert isinstance(ours, ForeignPolicy)
    docs, target = documents()
    want, got = plain_scores(theirs, docs, target), run(ours, docs, target)
    assert_near(got, want)
    assert_near(run(ours, docs[:1], target[:25]), plain_scores(theirs, docs[:1], target[:25]))
    outer = torch.linspace(-1, 1, len(target))
    for scores in (want, got):
        ((scores.logprobs_T + 0.3 * scores.entropy_T) * outer).sum().backward()
    grads = dict(theirs.named_parameters())
    for name, p in ours.inner.named_parameters():
        known = grads[name].grad
        if known is None or p.grad is None:
            assert known is p.grad, name
            continue
        scale = max(1.0, float(known.abs().max()))
        assert (p.grad - known).abs().max() < 1e-4 * scale, name

    with torch.no_grad():
        for p in ours.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    ours.inner.config.save_pretrained(tmp_path / "out")
    write_model(tmp_path / "out", named_weights(ours), 1 << 30)
    with torch.no_grad():
        moved = run(ours, docs, target)
        assert_near(moved, plain_scores(plain_model(tmp_path / "out"), docs, target))
        assert (moved.logprobs_T - got.logprobs_T).abs().max() > 1e-2
        twin = load_policy(directory, OPTIONS)
        load_weights(twin, dict(named_weights(ours)).__getitem__)
        assert torch.equal(run(twin, docs, target).logprobs_T, moved.logprobs_T)


def test_there_are_many_families_and_the_page_lists_them() -> None:
    assert len(FAMILIES) + len(REFUSED) >= 25 and len(FAMILIES) >= 15
    page = (DOCS / "models.md").read_text()
    assert table() in page


@pytest.mark.parametrize("family", REFUSED)
def test_a_refusal_is_one_line_with_type_and_reason(family: str, tmp_path: Path) -> None:
    config = make_config(family)
    if config.is_encoder_decoder or family == "quantised":
        config.save_pretrained(tmp_path)
    else:
        write_family(tmp_path, family)
    with pytest.raises(UserError) as error:
        load_policy(tmp_path, OPTIONS)
    line = str(error.value)
    assert "\n" not in line and REFUSED[family][2] in line
    assert f"(type '{config.model_type}') cannot be trained" in line


def test_files_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    """transformers fills a weight that is missing with random numbers; that is not a model."""
    directory = write_family(tmp_path, "mixtral")
    tensors = load_file(directory / "model.safetensors")
    gone = "model.layers.1.self_attn.o_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != gone}, directory / "model.safetensors")
    with pytest.raises(UserError, match=f"no weight of the right shape for '{gone}'"):
        load_policy(directory, OPTIONS)


HALF = ("gemma2", "deepseek_v3", "lfm2")
WELL = [f for f in FAMILIES if f not in FLOAT32_ONLY]
ON_CPU = [pytest.param(f, "cpu", marks=[] if f in HALF else pytest.mark.full) for f in WELL]
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ON_GPU = [pytest.param(f, "cuda", marks=[pytest.mark.gpu, NO_GPU]) for f in WELL]


def published(policy: Policy) -> dict[str, Tensor]:
    """The tensors of a version in bfloat16."""
    publisher, store = Publisher(), MemoryStore()
    drafts = publisher.begin(0, store, None)
    publisher.snapshot(policy, torch.bfloat16, 0, drafts)
    publisher.seal(drafts, None, background=False)
    return store.sealed[0].tensors


@pytest.mark.parametrize(("family", "device"), [*ON_CPU, *ON_GPU])
def test_half_precision_is_near_and_a_twin_is_equal(
    family: str, device: str, tmp_path: Path
) -> None:
    """A twin that holds what was published computes exactly what the policy computes."""
    options = OPTIONS.model_copy(update={"device": device, "compute_dtype": "bfloat16"})
    directory = write_family(tmp_path / "model", family)
    with torch.no_grad():
        start = load_policy(directory, OPTIONS)
        for p in start.parameters():
            p.copy_(p.bfloat16())
    write_model(directory, named_weights(start), 1 << 30)
    ours = load_policy(directory, options)
    docs, target = documents()
    on_device = [d.to(device) for d in docs], target.to(device)
    got = run(ours, *on_device)
    got.logprobs_T.sum().backward()
    with torch.no_grad():
        want = plain_scores(plain_model(directory), docs, target)
        # The median: rounding lets some tokens choose another expert.
        assert (got.logprobs_T.cpu() - want.logprobs_T).abs().median() < 0.03
        twin = clone_architecture(ours, options, directory)
        sealed = published(ours)
        load_weights(twin, sealed.__getitem__)
        again = run(twin, *on_device)
    assert torch.equal(again.logprobs_T, got.logprobs_T)
    assert not any(p.requires_grad for p in twin.parameters())
    assert all(p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)


@pytest.mark.parametrize("family", FLOAT32_ONLY)
def test_half_precision_is_refused_where_it_would_not_be_exact(family: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=FLOAT32_ONLY[family]):
        options = TrainerConfig(device="cpu", compute_dtype="bfloat16")
        load_policy(write_family(tmp_path, family), options)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_biases_that_choose_experts_are_published_unrounded(family: str, tmp_path: Path) -> None:
    policy = load_policy(write_family(tmp_path, family), OPTIONS)
    half = dict(stored_weights(policy, named_weights(policy), torch.bfloat16))
    biases = [n for n in half if n.endswith("e_score_correction_bias")]
    assert biases and all(half[n].dtype == torch.float32 for n in biases)
    assert all(t.dtype == torch.bfloat16 for n, t in half.items() if n not in biases)
    tensors = published(policy)
    assert {n: t.dtype for n, t in tensors.items()} == {n: t.dtype for n, t in half.items()}


@pytest.mark.parametrize("family", ["gpt_neox", "mixtral", "qwen3_next"])
def test_checkpointing_runs_layers_again_and_changes_nothing(family: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path, family)
    docs, target = documents()
    calls, kept, grads = [], [], []
    for kind in ("none", "layer"):
        options = TrainerConfig(device="cpu", activation_checkpointing=kind)
        policy = load_policy(directory, options)
        count, bytes_kept = [0], [0]

        def add(*_: Any, count: list[int] = count) -> None:
            count[0] += 1

        def keep(tensor: Tensor, total: list[int] = bytes_kept) -> Tensor:
            total[0] += tensor.numel()
            return tensor

        inside = [m for n, m in policy.named_modules() if n.endswith(("attn", ".attention"))]
        assert inside
        for module in inside:
            module.register_forward_pre_hook(add)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            scores = run(policy, docs, target)
        scores.logprobs_T.sum().backward()
        calls.append(count[0])
        kept.append(bytes_kept[0])
        grads.append({n: p.grad for n, p in policy.named_parameters() if p.grad is not None})
    assert calls[1] == 2 * calls[0]
    assert kept[1] < kept[0] / 2
    assert grads[0].keys() == grads[1].keys()
    assert all(torch.equal(grads[0][n], grads[1][n]) for n in grads[0])


def test_a_model_whose_layers_cannot_run_again_says_so(tmp_path: Path) -> None:
    options = TrainerConfig(device="cpu", activation_checkpointing="layer")
    with pytest.raises(UserError, match=r"\(type 'ctrl'\) .* 'layer' finds no layers"):
        load_policy(write_family(tmp_path, "ctrl"), options)


def test_dropout_of_the_model_never_acts(tmp_path: Path) -> None:
    policy = load_policy(write_family(tmp_path, "gpt2"), OPTIONS)  # its config has dropout of 0.1
    docs, target = documents()
    with torch.no_grad():
        first = run(policy, docs, target).logprobs_T
        policy.eval()
        policy.train()
        assert torch.equal(run(policy, docs, target).logprobs_T, first)


def test_adapters_train_and_merge_into_the_export(tmp_path: Path) -> None:
    directory = write_family(tmp_path / "model", "mixtral")
    policy = load_policy(directory, OPTIONS)
    add_lora(policy, TrainerConfig(device="cpu", lora_rank=2))
    with torch.no_grad():
        for name, p in policy.named_parameters():
            if "lora_B" in name:
                p.normal_(0.0, 0.3)
    policy.inner.config.save_pretrained(tmp_path / "out")
    write_model(tmp_path / "out", named_weights(policy), 1 << 30)
    docs, target = documents()
    with torch.no_grad():
        want = plain_scores(plain_model(tmp_path / "out"), docs, target)
        assert_near(run(policy, docs, target), want)
    other = load_policy(write_family(tmp_path / "gpt2", "gpt2"), OPTIONS)
    with pytest.raises(UserError, match="none of the usual linear layers"):
        add_lora(other, TrainerConfig(device="cpu", lora_rank=2))


@pytest.mark.parametrize(
    "kind", ["MistralConfig", "Gemma2Config", "MixtralConfig", "DeepseekV3Config", "FalconConfig"]
)
def test_a_large_model_is_checked_on_a_small_clone(kind: str) -> None:
    """Of the default sizes of a family, which are those of its large models."""
    import transformers

    config = getattr(transformers, kind)()
    data = next(_smaller(config.to_dict(), small=False))
    with torch.device("meta"):
        small = type(config).from_dict(data)
        model = transformers.AutoModelForCausalLM.from_config(small)
    assert sum(p.numel() for p in model.parameters()) < 10_000_000
    whole, cut = config.to_dict(), small.to_dict()
    for name in ("attn_logit_softcapping", "scoring_func", "alibi", "attention_bias", "rope_theta"):
        assert whole.get(name) == cut.get(name)
    if whole.get("sliding_window"):
        assert cut["sliding_window"] == WINDOW
    assert set(whole.get("layer_types") or []) == set(cut.get("layer_types") or [])


def test_the_attention_that_forgets_a_soft_cap_is_not_used(tmp_path: Path) -> None:
    """transformers' sdpa leaves Gemma2's soft-cap of scores out without a word."""
    directory = write_family(tmp_path, "gemma2")
    policy = load_foreign(directory, CPU, torch.float32, OPTIONS)
    assert policy.inner.config._attn_implementation == "eager"
    docs, target = documents()
    with torch.no_grad():
        want = run(policy, docs, target)
        policy.inner.set_attn_implementation("sdpa")
        wrong = run(policy, docs, target)
    assert (wrong.logprobs_T - want.logprobs_T).abs().max() > 10 * DIFFERENCE_MAX


OWN_CODE = """
from transformers import LlamaForCausalLM

class OwnForCausalLM(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = 5.0 * (out.logits / 5.0).tanh()
        return out
"""


def test_code_that_comes_with_a_model_runs_only_if_trusted(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, "llama")
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = ["OwnForCausalLM"]
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "modeling_own.py").write_text(OWN_CODE)
    docs, target = documents()
    docs, target = [d % TINY_VOCAB for d in docs], target % TINY_VOCAB
    with pytest.raises(UserError, match="transformers has no 'OwnForCausalLM'"):
        load_policy(directory, OPTIONS)
    own = load_policy(directory, OPTIONS.model_copy(update={"trust_remote_code": True}))
    assert type(own.inner).__name__ == "OwnForCausalLM"
    with torch.no_grad():
        want = plain_scores(own.inner, docs, target)
        assert_near(run(own, docs, target), want)


def test_the_learner_refuses_what_it_cannot_compute(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mixes documents or is not causal"):
        Learner(write_family(tmp_path, "bert"), AlgorithmConfig(), OPTIONS)


@pytest.mark.parametrize("family", ["granitemoe", "gpt2"])
def test_a_learner_goes_on_from_its_checkpoint(family: str, tmp_path: Path) -> None:
    """Reference, published versions and a resume, for a model whose files have other names."""
    directory = write_family(tmp_path / "model", family)
    algorithm = AlgorithmConfig(loss="grpo", kl_coef=0.1)
    options = TrainerConfig(device="cpu", lr=1e-2, canonical_order=True)
    learner, store = Learner(directory, algorithm, options, batch_groups=4), MemoryStore()
    learner.begin_step(0)
    learner.feed(make_groups(0, 4))
    learner.finish_step()
    learner.publish(store, 1)
    learner.save(tmp_path / "saved")
    again = Learner.resume(tmp_path / "saved", algorithm, options, batch_groups=4)
    adopted = Learner(directory, algorithm, options, batch_groups=4)
    adopted.adopt(store, 1)
    assert torch.equal(flat(again), flat(learner)) and torch.equal(flat(adopted), flat(learner))
    for one in (learner, again):
        one.begin_step(1)
        one.feed(make_groups(1, 4, version=1))
        metrics = one.finish_step()
        assert metrics["kl"] > 0
    assert torch.equal(flat(again), flat(learner))


def test_a_checkpoint_keeps_its_own_names(tmp_path: Path) -> None:
    """Experts one by one, as Mixtral's files have them, not stacked as transformers runs them."""
    directory = write_family(tmp_path, "mixtral")
    policy = load_policy(directory, OPTIONS)
    files = load_file(directory / "model.safetensors")
    ours = dict(named_weights(policy))
    assert ours.keys() == files.keys()
    assert any("block_sparse_moe.experts.3.w1" in n for n in ours), sorted(ours)
    assert all(torch.equal(ours[n], files[n]) for n in files)
    assert json.loads((directory / "config.json").read_text())["model_type"] == "mixtral"
