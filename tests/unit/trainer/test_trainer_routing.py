"""A mixture of experts trains on the routing of the rollout: exactly that, with gradients through
the shares; and the auxiliary loss of its routers is that of transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import read_spec
from dora_rl.model.spec import MoeSpec
from dora_rl.trainer.documents import Document, collate, documents_of
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.policy.decoder import Decoder, SparseMlp
from dora_rl.trainer.policy.model import load_policy
from dora_rl.trainer.scoring import score
from dora_rl.types import Group, RequestId, SamplingParams, Trajectory
from tests.kit.engines import random_prompts
from tests.kit.tiny_models import save_model
from tests.kit.trainer_cases import forked, make_groups, routed, write_tiny_model
from tests.kit.trainer_store import MemoryStore

NONE = 255


@cache
def _saved(family: str, folder: Path) -> tuple[Any, Path]:
    return save_model(family, folder / family), folder / family


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("routing")
    return lambda family: _saved(family, folder)


def sampled(path: Path, dtype: str) -> list[Group]:
    """What an engine in `dtype` draws, with its routing where it has one."""
    options: dict[str, Any] = {"dtype": dtype, "num_blocks": 128, "speculation": "off"}
    engine = Engine(read_spec(path), EngineOptions(record_routing=True, **options))
    engine.load(0, path)
    params = SamplingParams(tokens_max=60, ignore_eos=True)
    for number, prompt in enumerate(random_prompts((20,) * 12)):
        engine.submit(Request(RequestId(number, 0), 0, prompt, params))
    done: list[Trajectory] = []
    while engine.has_work():
        done += [output.trajectory for output in engine.step() if output.trajectory]
    return [Group(s.request.group, 0, s.prompt_ids, (replace(s, reward=1.0),)) for s in done]


def documents(groups: list[Group]) -> list[Document]:
    return [d for group in groups for s in group.samples for d in documents_of(group, s, 0.0)]


def policy_of(path: Path, **options: Any) -> Decoder:
    policy = load_policy(path, TrainerConfig(device="cpu", **options))
    assert isinstance(policy, Decoder)
    return policy


def gaps(policy: Decoder, groups: list[Group]) -> Tensor:
    """Between the learner's log-probs and the engine's, token by token."""
    asked = documents(groups)
    scored = score(policy, asked, 1.0, 4096)
    pairs = zip(scored, asked, strict=True)
    return torch.cat([(ours - d.rollout_logprobs).abs() for ours, d in pairs])


def visits(policy: Decoder, groups: list[Group]) -> list[list[int]]:
    """How often each expert of each layer is visited while the groups are scored."""
    found: list[list[int]] = []

    def note(module: Any, args: tuple[Tensor, Tensor]) -> None:
        found.append(args[1].tolist())

    mixtures = [m for m in policy.modules() if isinstance(m, SparseMlp)]
    hooks = [mixture.experts.register_forward_pre_hook(note) for mixture in mixtures]
    score(policy, documents(groups), 1.0, 4096)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize(("engine", "learner"), [("bfloat16", "bfloat16"), ("float32", "bfloat16")])
def test_with_replay_engine_and_learner_are_as_close_as_those_of_a_dense_model(
    models: Any, engine: str, learner: str
) -> None:
    _, path = models("qwen3-moe")
    groups = sampled(path, engine)
    with_replay, without = (
        policy_of(path, compute_dtype=learner, router_replay=how) for how in ("on", "off")
    )
    replayed, alone = (gaps(policy, groups) for policy in (with_replay, without))
    _, dense = models("qwen3")
    as_dense = gaps(policy_of(dense, compute_dtype=learner), sampled(dense, engine))
    assert float(replayed.mean()) <= float(as_dense.mean())
    assert float(replayed.max()) <= float(as_dense.max())
    # A token that another expert sees has another log-prob altogether.
    assert float(alone.mean()) > 1.3 * float(replayed.mean())
    assert float(alone.max()) > 4 * float(replayed.max())

    # Every choice is the engine's, but of the newest token of a response, which none has computed.
    recorded = np.concatenate([g.samples[0].expert_ids[:-1] for g in groups])  # type: ignore[index]
    for layer, of_layer in enumerate(visits(with_replay, groups)):
        engines = np.bincount(recorded[:, layer].reshape(-1), minlength=8)
        assert (of_layer - engines).min() >= 0 and (of_layer - engines).sum() == 2 * len(groups)
    assert visits(with_replay, groups) != visits(without, groups)


def test_in_the_same_numbers_nothing_differs_and_a_shifted_routing_is_seen(models: Any) -> None:
    _, path = models("qwen3-moe")
    groups = sampled(path, "float32")
    assert gaps(policy_of(path), groups).max() < 1e-4
    right = trained(path, groups)
    assert right["moe/mismatch"] == 0.0 and right["moe/replayed"] == 1.0
    assert right["mismatch_abs"] < 1e-5
    shifted = [_with_experts(g, lambda ids: np.roll(ids, 1, 0)) for g in groups]
    assert gaps(policy_of(path), shifted).mean() > 0.1
    wrong = trained(path, shifted)
    assert wrong["moe/mismatch"] > 0.3 and wrong["mismatch_abs"] > 0.1
    off = trained(path, shifted, router_replay="off")
    assert "moe/mismatch" not in off and off["mismatch_abs"] < 1e-5


def trained(
    path: Path, groups: list[Group], algorithm: AlgorithmConfig | None = None, **options: Any
) -> dict[str, float]:
    """The figures of one step."""
    options = {"device": "cpu", "lr": 0.0, "pack_tokens": 512} | options
    algorithm = algorithm or AlgorithmConfig(skip_zero_advantage=False)
    learner = Learner(path, algorithm, TrainerConfig(**options))
    learner.begin_step(0)
    learner.feed(groups)
    return learner.finish_step()


def _with_experts(group: Group, change: Any) -> Group:
    samples = tuple(replace(s, expert_ids=change(s.expert_ids)) for s in group.samples)
    return replace(group, samples=samples)


@pytest.mark.parametrize("normalise", [True, False])
def test_values_and_gradients_are_those_of_the_given_experts(normalise: bool) -> None:
    """One token and one expert at a time, with shares that this router gives them."""
    moe = MoeSpec(num_experts=6, top_k=2, intermediate=5, normalise=normalise, sparse_layers=(0,))
    torch.manual_seed(0)
    mixture, x = SparseMlp(8, moe).double(), torch.randn(7, 8, dtype=torch.float64)
    for p in mixture.parameters():
        torch.nn.init.normal_(p)
    given = torch.stack([torch.randperm(6)[:2] for _ in range(7)]).to(torch.uint8)
    given[3] = NONE  # not recorded: the router's own
    inputs = [x.requires_grad_(), *mixture.parameters()]
    out, choice = mixture.replay(x, given)
    own = mixture.gate(x)[1]
    expected_ids = torch.where(given == NONE, own, given.long())
    assert torch.equal(choice.expert_PK, expected_ids) and torch.equal(choice.own_PK, own)

    rows = []
    for token, experts in zip(x, expected_ids.tolist(), strict=True):
        probability = functional.linear(token, mixture.gate.weight).float().softmax(-1)
        shares = probability[experts]
        shares = shares / shares.sum() if normalise else shares
        parts = []
        for expert, share in zip(experts, shares.double(), strict=True):
            gate, up = (mixture.experts.gate_up_proj[expert] @ token).chunk(2)
            parts.append(share * (mixture.experts.down_proj[expert] @ (functional.silu(gate) * up)))
        rows.append(sum(parts))
    expected = torch.stack(rows)  # type: ignore[arg-type]
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    weight = torch.randn_like(out)
    ours, theirs = (
        torch.autograd.grad((y * weight).sum(), inputs, retain_graph=True) for y in (out, expected)
    )
    assert ours[1].abs().max() > 0, "the router learns through the shares"
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def gradient(path: Path, groups: list[Group], **options: Any) -> tuple[dict[str, Tensor], Any]:
    """Of one update, before it is applied; and its figures."""
    options = {"device": "cpu", "pack_tokens": 64} | options
    algorithm = AlgorithmConfig(skip_zero_advantage=False)
    learner = Learner(path, algorithm, TrainerConfig(**options))
    learner.begin_step(0)
    learner.feed(groups)
    learner.run_packs(flush=True)
    found = {n: p.grad.clone() for n, p in learner.policy.named_parameters() if p.grad is not None}
    return found, learner._update.meters.read()


def assert_same_gradient(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys() and any("gate.weight" in name for name in a)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6, msg=name)


def test_layers_that_are_computed_again_and_other_packs_give_the_same_gradient(
    tmp_path: Path,
) -> None:
    path = write_tiny_model(tmp_path, "qwen3_moe")
    moe = read_spec(path).moe
    assert moe is not None
    groups = [routed(forked(g), g.id, moe) for g in make_groups(3, 3)]
    how = {"router_aux_coef": 0.5}
    kept, figures = gradient(path, groups, **how)
    again, same = gradient(path, groups, activation_checkpointing="layer", **how)
    packed, others = gradient(path, groups, pack_tokens=10_000, **how)
    for other in (again, packed):
        assert_same_gradient(kept, other)
    names = ("moe/mismatch", "moe/replayed", "moe/balance")
    assert figures["train/packs"] > others["train/packs"] == 1
    for name in names:
        assert figures[name] == pytest.approx(same[name]) == pytest.approx(others[name]), name
    assert 0.2 < figures["moe/mismatch"] < 0.8
    alone, _ = gradient(path, groups, router_replay="off", **how)
    with pytest.raises(AssertionError):
        assert_same_gradient(kept, alone)


def test_documents_without_a_record_go_their_own_way_beside_others(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, "qwen3_moe")
    policy = policy_of(path)
    moe = policy.arch.moe
    assert moe is not None
    plain = make_groups(3, 2, samples=1)
    mixed = [routed(plain[0], 0, moe), plain[1]]
    # A record of other tokens, such as of another prompt, is none.
    foreign = [_with_experts(routed(plain[0], 0, moe), lambda ids: ids[1:]), plain[1]]
    own, some, none = (score(policy, documents(g), 1.0, 4096) for g in (plain, mixed, foreign))
    assert torch.equal(own[1], some[1]) and not torch.equal(own[0], some[0])
    assert all(torch.equal(a, b) for a, b in zip(own, none, strict=True))


def test_sealed_versions_replay_and_the_reference_does_not(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path, "qwen3_moe")
    moe = read_spec(path).moe
    assert moe is not None
    groups = [routed(g, g.id, moe) for g in make_groups(3, 4)]
    store = MemoryStore()
    algorithm = AlgorithmConfig(kl_coef=0.1, old_logprobs="behaviour", skip_zero_advantage=False)
    options = TrainerConfig(device="cpu", lr=0.0, teacher_model=str(path))
    learner = Learner(path, algorithm, options, store=store)
    for version in (0, 1):
        learner.publish(store, version).result()
    learner.begin_step(1)  # K > 0: the groups are of version 0, whose weights are the same
    learner.feed(groups)
    figures = learner.finish_step()
    assert store.opened == [0]
    assert figures["ppo_kl"] == 0.0, "policy and sealed version go the same ways"
    assert figures["kl"] > 1e-3, "the reference does not"
    assert learner.reference is not None and learner.teacher is not None
    asked = documents(groups)
    own = score(policy_of(path, router_replay="off"), asked, 1.0, 4096)
    for frozen in (learner.reference, learner.teacher.policy):
        found = score(frozen, asked, 1.0, 4096)
        assert all(torch.equal(a, b) for a, b in zip(own, found, strict=True))


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-moe-mixed"])
def test_the_auxiliary_loss_and_its_gradient_are_those_of_transformers(
    models: Any, family: str
) -> None:
    model, path = models(family)
    policy = policy_of(path, router_aux_coef=1.0)
    (ids,) = random_prompts((50,))
    rows = torch.arange(49)
    document = Document(torch.tensor(ids), rows, torch.zeros(49), 0.0, 0)
    pack = collate([document], torch.device("cpu"))
    routing = policy(pack.token_ids_P, pack.layout, pack.rows_T, pack.target_T).routing
    assert routing is not None and routing.aux_coef == 1.0
    routing.balance_S.sum().backward()

    model.zero_grad()
    logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    loss = load_balancing_loss_func(logits, 8, 2)
    assert isinstance(loss, Tensor)
    loss.backward()
    torch.testing.assert_close(routing.balance_S, loss.detach()[None], rtol=1e-5, atol=1e-5)
    theirs = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    ours = {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
    for layer in policy.arch.moe.sparse_layers:  # type: ignore[union-attr]
        for name in ("mlp.gate.weight", "self_attn.o_proj.weight", "input_layernorm.weight"):
            name = f"model.layers.{layer}.{name}"
            assert theirs[name].abs().max() > 1e-5
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-5)


def test_the_balance_is_in_the_loss_of_every_document_even_where_nothing_else_is(
    tmp_path: Path,
) -> None:
    """Equal rewards have no advantage; their routers learn all the same."""
    path = write_tiny_model(tmp_path, "qwen3_moe")
    groups = [
        replace(g, samples=tuple(replace(s, reward=1.0) for s in g.samples))
        for g in make_groups(3, 3)
    ]
    plain = AlgorithmConfig(loss="grpo", aggregation="token_mean")
    default = TrainerConfig(device="cpu", lr=0.0)
    found = {}
    for coef in (0.0, 0.5, 1.0):
        options = default.model_copy(update={"router_aux_coef": coef})
        learner = Learner(path, plain, options)
        learner.begin_step(0)
        learner.feed(groups)
        found[coef] = learner.finish_step()
    assert found[0.0]["train/tokens_skipped"] > 0 and "moe/balance" not in found[0.0]
    assert "train/tokens_skipped" not in found[1.0]
    balance = found[1.0]["moe/balance"]
    assert balance > 1.5  # about 2 where each token has two experts and the load is even
    assert found[1.0]["loss"] == pytest.approx(balance, rel=1e-5)
    assert found[0.5]["loss"] == pytest.approx(balance / 2, rel=1e-5)
    assert found[1.0]["moe/load_max"] >= 1.0
