"""The SDK's own client against our server: it learns, saves, samples; nobody disturbs another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from dora_rl.tinker import SDK_VERSION
from tests.kit.places import MODEL
from tests.kit.tinker_server import KEY, Served, tinker_server

pytestmark = pytest.mark.tinker

ADAM = types.AdamParams(learning_rate=5e-3)
SEQUENCES = ([2, 3, 4, 5, 6], [7, 8, 9, 10], [3, 11, 12])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tinker_server(tmp_path_factory.mktemp("tinker")) as one:
        yield one


def service(served: Served, key: str = KEY) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=served.server.url, api_key=key)


@pytest.fixture
def client(served: Served) -> Iterator[tinker.ServiceClient]:
    with service(served) as one:
        yield one


def prompt_of(ids: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(ids)


def sft(ids: list[int]) -> types.Datum:
    inputs: Any = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    return types.Datum(model_input=prompt_of(ids[:-1]), loss_fn_inputs=inputs)


def drawn(prompt: list[int], ids: list[int], logprobs: list[float], advantage: float) -> Any:
    whole, before = [*prompt, *ids], len(prompt) - 1
    inputs: Any = {
        "target_tokens": whole[1:],
        "logprobs": [0.0] * before + logprobs,
        "advantages": [0.0] * before + [advantage] * len(ids),
    }
    return types.Datum(model_input=prompt_of(whole[:-1]), loss_fn_inputs=inputs)


def test_the_version_is_the_one_of_the_documents() -> None:
    assert tinker.__version__ == SDK_VERSION


def test_supervised_learning(client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client("tiny", rank=8, seed=1).result()
    data, losses = [sft(ids) for ids in SEQUENCES], []
    for _ in range(25):
        both = trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(ADAM)
        losses.append(both[0].result().metrics["loss:sum"])
        both[1].result()
    assert losses[-1] < 0.02 * losses[0]
    sampler = trainer.save_weights_and_get_sampling_client().result()
    greedy = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    for ids in SEQUENCES:
        (one,) = sampler.sample(prompt_of(ids[:1]), 1, greedy).result().sequences
        if ids[0] != 3:  # which has two ways to go on
            assert one.tokens[: len(ids) - 1] == ids[1:4]
    assert trainer.get_tokenizer().encode("1") == sampler_tokenizer().encode("1")


def sampler_tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(MODEL))


def test_reinforcement_learning_with_groups(client: tinker.ServiceClient) -> None:
    """As GRPO: groups of eight, rewards relative to the group, importance sampling."""
    trainer = client.create_lora_training_client("tiny", rank=8, seed=2).result()
    prompts, means = ([2, 3], [4, 5], [6, 7], [8, 2]), list[float]()
    for step in range(12):
        sampler = trainer.save_weights_and_get_sampling_client().result()
        how = types.SamplingParams(max_tokens=6, temperature=1.0, seed=step, stop=[])
        futures = [sampler.sample(prompt_of(prompt), 8, how) for prompt in prompts]
        data, rewards_all = list[types.Datum](), list[float]()
        for prompt, future in zip(prompts, futures, strict=True):
            found = future.result().sequences
            rewards = [one.tokens.count(9) / len(one.tokens) for one in found]
            rewards_all += rewards
            mean = sum(rewards) / len(rewards)
            for one, reward in zip(found, rewards, strict=True):
                assert one.logprobs is not None
                data.append(drawn(prompt, one.tokens, one.logprobs, reward - mean))
        means.append(sum(rewards_all) / len(rewards_all))
        loss = trainer.forward_backward(data, "importance_sampling")
        update = trainer.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0))
        loss.result(), update.result()
    assert means[0] < 0.3 and means[-1] > 0.9, means


def run(served: Served, key: str, seed: int, first: int) -> list[Any]:
    """Everything a client sees of a short training."""
    found: list[Any] = []
    with service(served, key) as client:
        trainer = client.create_lora_training_client("tiny", rank=2 + seed, seed=seed).result()
        data = [sft([first + i for i in range(5)]), sft([first, 3, first])]
        for step in range(3):
            both = trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(ADAM)
            outputs = both[0].result()
            found += [one["logprobs"].tolist() for one in outputs.loss_fn_outputs]
            found += [outputs.metrics, both[1].result().metrics]
            sampler = trainer.save_weights_and_get_sampling_client().result()
            how = types.SamplingParams(max_tokens=6, temperature=1.0, seed=step, stop=[])
            futures = [sampler.sample(prompt_of([first + i]), 4, how) for i in range(3)]
            for future in futures:
                found += [(one.tokens, one.logprobs) for one in future.result().sequences]
    return found


def test_two_clients_at_once_give_what_each_gives_alone(tmp_path: Path) -> None:
    clients = {"a": ("tml-key-of-a", 1, 2), "b": ("tml-key-of-b", 2, 8)}
    alone: dict[str, Any] = {}
    for name, what in clients.items():
        with tinker_server(tmp_path / name) as served:
            alone[name] = run(served, *what)
    together: dict[str, Any] = {}
    with tinker_server(tmp_path / "both") as served:
        threads = [
            threading.Thread(target=lambda n=n, w=w: together.update({n: run(served, *w)}))
            for n, w in clients.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert together == alone and alone["a"] != alone["b"]


def test_a_state_goes_on_in_another_client_and_after_a_restart(tmp_path: Path) -> None:
    data = [sft(ids) for ids in SEQUENCES]

    def more(trainer: Any) -> list[float]:
        found = []
        for _ in range(2):
            both = trainer.forward_backward(data, "cross_entropy"), trainer.optim_step(ADAM)
            found.append(both[0].result().metrics["loss:sum"])
            found.append(both[1].result().metrics["grad_norm"])
        return found

    with tinker_server(tmp_path) as served, service(served) as client:
        trainer = client.create_lora_training_client("tiny", rank=4, seed=1).result()
        more(trainer)
        path = trainer.save_state("two").result().path
        named = trainer.save_weights_for_sampler("two").result().path
        expected = more(trainer)
        again = client.create_training_client_from_state_with_optimizer(path).result()
        assert more(again) == expected
        bare = client.create_training_client_from_state(path).result()
        assert more(bare) != expected and bare.get_info().lora_rank == 4
    with tinker_server(tmp_path) as served, service(served) as client:
        again = client.create_training_client_from_state_with_optimizer(path).result()
        assert more(again) == expected
        sampler = client.create_sampling_client(model_path=named).result()
        assert sampler.get_base_model() == "tiny"
        scored = sampler.compute_logprobs(prompt_of([2, 3, 4])).result()
        assert scored[0] is None and all(value is not None for value in scored[1:])


def test_custom_losses_run_in_the_client(client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client("tiny", rank=4, seed=1).result()
    data = [sft(ids) for ids in SEQUENCES]

    def squares(data: Any, logprobs: Any) -> Any:
        loss = sum((one**2).sum() for one in logprobs)
        return loss, {"squares:sum": float(loss.detach())}

    losses = []
    for _ in range(4):
        future = trainer.forward_backward_custom(data, squares)
        update = trainer.optim_step(types.AdamParams(learning_rate=2e-3))
        losses.append(future.result().metrics["squares:sum"])
        update.result()
    assert losses == sorted(losses, reverse=True)


def test_the_rest_client_lists_and_deletes(served: Served, client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client("tiny", rank=4, seed=1).result()
    path = trainer.save_state("one", ttl_seconds=7200).result().path
    trainer.save_weights_for_sampler("one").result()
    with pytest.raises(tinker.RequestFailedError, match="is there already"):
        trainer.save_state("one").result()
    trainer.save_state("one", overwrite=True).result()
    rest = tinker.RestClient(base_url=served.server.url, api_key=KEY)
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == ("tiny", True, 4)
    found = rest.list_checkpoints(trainer.model_id).result().checkpoints
    assert [one.checkpoint_type for one in found] == ["sampler", "training"]
    assert all(one.size_bytes for one in found)
    rest.delete_checkpoint(trainer.model_id, "weights/one").result()
    assert len(rest.list_checkpoints(trainer.model_id).result().checkpoints) == 1
    names = [m.model_name for m in rest.get_server_capabilities().result().supported_models]
    assert "tiny" in names
    other = tinker.RestClient(base_url=served.server.url, api_key="tml-second-key")
    with pytest.raises(tinker.NotFoundError):
        other.list_checkpoints(trainer.model_id).result()


def test_mistakes_are_one_line(client: tinker.ServiceClient) -> None:
    trainer = client.create_lora_training_client("tiny", rank=4, seed=1).result()
    with pytest.raises(tinker.RequestFailedError, match="there is no loss 'mine' here"):
        trainer.forward_backward([sft([2, 3])], "mine").result()  # type: ignore[arg-type]
    with pytest.raises(tinker.RequestFailedError, match="above --rank-max 8"):
        client.create_lora_training_client("tiny", rank=64).result()
    with pytest.raises(tinker.RequestFailedError, match="one base, 'tiny'"):
        client.create_lora_training_client("Qwen/Qwen3-8B").result()
    with pytest.raises(tinker.NotFoundError, match="nothing of yours"):
        client.create_sampling_client(model_path="tinker://a:train:0/sampler_weights/b").result()
    assert np.isfinite(trainer.forward([sft([2, 3])], "cross_entropy").result().metrics["loss:sum"])
