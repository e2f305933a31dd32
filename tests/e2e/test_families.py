"""A family from end to end: trained, published to engines of every kind, saved, read back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.engine.transfer import move
from dora_rl.model.directory import HfDirectory, read_spec
from dora_rl.trainer.attention import Layout
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.policy.decoder import Decoder
from dora_rl.types import RequestId, SamplingParams, Trajectory
from dora_rl.weights.store import SharedMemoryWeightStore
from tests.kit.engines import check_against, finish_all, random_prompts
from tests.kit.tiny_models import FAMILIES, VOCAB, save_model
from tests.kit.trainer_cases import SMOOTH_EPS, changed, flat, make_groups

TRAINER = TrainerConfig(lr=1e-3, device="cpu", pack_tokens=64)
SMALL = {"block_tokens": 16, "num_blocks": 96, "context_max": 256, "seqs_max": 8}
NEW = [family for family in FAMILIES if not family.startswith(("llama", "qwen"))]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def trained(model: Path, trainer: TrainerConfig) -> Learner:
    learner = Learner(model, AlgorithmConfig(), trainer)
    assert isinstance(learner.policy, Decoder)
    learner.begin_step(0)
    learner.feed(make_groups(0, 2))
    learner.finish_step()
    return learner


def published(learner: Learner, folder: Path) -> SharedMemoryWeightStore:
    store = SharedMemoryWeightStore(folder)
    learner.publish(store, 1).result()
    return store


def scores(learner: Learner, ids: torch.Tensor) -> torch.Tensor:
    """Of a pack of two documents, `ids` and its beginning."""
    pack, short = torch.cat((ids, ids[:9])), len(ids)
    rows = torch.arange(short - 1)
    with torch.no_grad():
        layout = Layout([short, 9], CPU)
        return learner.policy(pack, layout, rows, ids[1:].to(CPU)).logprobs_T.float()


def reference(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        table = model(ids[None]).logits[0].float().log_softmax(-1)
    return table[:-1].gather(-1, ids[1:, None]).squeeze(-1)


def generated(engines: list[Engine], tokens: int = 20) -> list[Trajectory]:
    """Greedy; samples share their prompt's blocks, and some go on in the second engine."""
    params = SamplingParams(tokens_max=tokens, temperature=0, ignore_eos=True)
    for group, prompt in enumerate(random_prompts((5, 33, 50))):
        for sample in range(2):
            engines[0].submit(Request(RequestId(group, sample), 1, prompt, params))
    for _ in range(6):
        engines[0].step()
    for other in engines[1:]:
        for group in range(3):
            move(engines[0], other, RequestId(group, 1))
    done = {key: value for engine in engines for key, value in finish_all(engine).items()}
    assert len(done) == 6 and not any(engine.stats().prefill_tokens for engine in engines[1:])
    return list(done.values())


@pytest.mark.parametrize("family", NEW)
def test_what_is_trained_is_what_engines_and_transformers_compute(
    family: str, tmp_path: Path
) -> None:
    """Names of the files stay; a version is loaded by its canary in C and in torch, and requests
    move between the two; another learner goes on from it."""
    model = tmp_path / "model"
    save_model(family, model)
    learner = trained(model, TRAINER)
    directory = learner.save(tmp_path / "saved")
    assert sorted(HfDirectory(directory).names()) == sorted(HfDirectory(model).names())
    theirs, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.randint(0, VOCAB, (60,), generator=torch.Generator().manual_seed(1))
    assert (scores(learner, ids) - reference(theirs, ids)).abs().max() < 1e-4
    store = published(learner, tmp_path / "store")
    engines = []
    for compiled in (True, False):
        options = EngineOptions(**SMALL, compiled_kernels=compiled)
        engines.append(Engine(read_spec(model), options))
        engines[-1].load(1, store.open(1))
    for trajectory in generated(engines):
        check_against(theirs, trajectory)
    again = Learner(model, AlgorithmConfig(), TRAINER)
    assert not torch.equal(flat(again), flat(learner))
    again = Learner.resume(directory, AlgorithmConfig(), TRAINER)
    assert torch.equal(flat(again), flat(learner))


@pytest.mark.parametrize("family", NEW)
def test_adapters_are_published_and_saved_under_the_names_of_the_family(
    family: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    model = tmp_path / "model"
    base = save_model(family, model)
    learner = trained(model, changed(TRAINER, lora_rank=2, lr=3e-2))
    directory = learner.save(tmp_path / "saved")
    adapted = PeftModel.from_pretrained(base, str(directory / "adapter"))
    ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1))
    assert (scores(learner, ids) - reference(adapted, ids)).abs().max() < 1e-4
    store = published(learner, tmp_path / "store")
    engine = Engine(read_spec(model), EngineOptions(**SMALL, lora_rank=2))
    engine.load_base(model)
    engine.load(1, store.open(1))
    for trajectory in generated([engine], 9):
        check_against(adapted, trajectory)


@pytest.mark.parametrize("family", NEW)
def test_bfloat16_stays_near(family: str, tmp_path: Path) -> None:
    """Learner and engine in half precision, against transformers in float32."""
    model = tmp_path / "model"
    exact = save_model(family, model)
    learner = Learner(model, AlgorithmConfig(), changed(TRAINER, compute_dtype="bfloat16"))
    store = published(learner, tmp_path / "store")
    engine = Engine(read_spec(model), EngineOptions(**SMALL, dtype="bfloat16"))
    engine.load(1, store.open(1))
    for trajectory in generated([engine], 9):
        ids = torch.tensor([*trajectory.prompt_ids, *trajectory.token_ids])
        want = reference(exact, ids)[-9:]
        assert (scores(learner, ids)[-9:] - want).abs().mean() < 0.1
        assert (torch.tensor(trajectory.logprobs) - want).abs().mean() < 0.1


@pytest.mark.parametrize("rank", [0, 2], ids=["whole", "adapters"])
def test_what_transformers_ran_goes_on_packed(rank: int, tmp_path: Path) -> None:
    """A run that began before the packed decoder knew its family: weights, adapters, moments."""
    model = tmp_path / "model"
    save_model("olmo2", model)
    trainer = changed(TRAINER, eps=SMOOTH_EPS, lora_rank=rank)
    before = changed(trainer, implementation="transformers")
    old = Learner(model, AlgorithmConfig(), before)
    ends = []
    for step in range(2):
        old.begin_step(step)
        old.feed(make_groups(step, 2, version=step))
        old.finish_step()
        ends.append(old.save(tmp_path / f"step{step}"))
    new = Learner.resume(ends[0], AlgorithmConfig(), trainer)
    assert isinstance(new.policy, Decoder) and not isinstance(old.policy, Decoder)
    new.begin_step(1)
    new.feed(make_groups(1, 2, version=1))
    new.finish_step()
    last = Learner.resume(ends[1], AlgorithmConfig(), trainer)
    assert (flat(new) - flat(last)).abs().max() < 1e-4
    moments = [learner.optimizer.state_tensors() for learner in (new, last)]
    assert moments[0].keys() == moments[1].keys() and moments[0]
    assert all((moments[0][name] - t).abs().max() < 1e-4 for name, t in moments[1].items())
