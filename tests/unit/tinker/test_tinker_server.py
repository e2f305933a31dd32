"""`serve --tinker` as a whole: learning, two clients at once, keys, retries, order, a restart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_rl.tinker.service import Limits
from dora_rl.types import UserError
from tests.kit.tinker_server import (
    LIMITS,
    Outputs,
    Raw,
    Refused,
    Samples,
    Served,
    datum_body,
    pass_body,
    read_samples,
    tinker_server,
)

PAIRS = ([2, 3, 4, 5, 6], [7, 8, 9, 10], [3, 11, 12])


def sft_data(pairs: Any = PAIRS) -> list[bytes]:
    return [
        datum_body(ids[:-1], target_tokens=ids[1:], weights=[1.0] * (len(ids) - 1)) for ids in pairs
    ]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tinker_server(tmp_path_factory.mktemp("tinker")) as one:
        yield one


@pytest.fixture
def raw(served: Served) -> Iterator[Raw]:
    client = served.client()
    client.open()
    yield client
    client.http.post(f"/api/v1/sessions/{client.session}/finish", json={})


def test_supervised_learning(raw: Raw) -> None:
    model, losses = raw.model(), []
    for _ in range(12):
        losses.append(model.run(sft_data()).loss)
        assert model.step(lr=5e-3) > 0
    assert losses[-1] < 0.1 * losses[0]
    sampler = model.snapshot(0)
    greedy = {"temperature": 0, "max_tokens": 3, "stop": []}
    assert sampler.sample([7], params=greedy).token_ids == [[8, 9, 10]]
    scored = sampler.score([7, 8, 9, 10])[1:]
    seen = model.run(sft_data()[1:2], forward_only=True).logprobs[0]
    assert scored == pytest.approx(seen, abs=1e-5), "learner and engine agree"


def test_reinforcement_learning(raw: Raw) -> None:
    """Groups, rewards, importance sampling: the rewarded token takes over."""
    model, wanted, means = raw.model(), 9, []
    for step in range(6):
        sampler, data, total = model.snapshot(step), list[bytes](), 0.0
        for prompt in ([2, 3], [4, 5]):
            found = sampler.sample(prompt, 8, params={"seed": step, "stop": []})
            rewards = [ids.count(wanted) / len(ids) for ids in found.token_ids]
            mean = sum(rewards) / len(rewards)
            total += mean / 2
            for ids, logprobs, reward in zip(found.token_ids, found.logprobs, rewards, strict=True):
                data.append(policy_datum(prompt, ids, logprobs, reward - mean))
        means.append(total)
        model.run(data, "importance_sampling")
        model.step(lr=2e-2)
    assert means[0] < 0.3 and means[-1] > 0.6, means


def policy_datum(
    prompt: list[int], ids: list[int], logprobs: list[float], advantage: float
) -> bytes:
    whole, before = [*prompt, *ids], len(prompt) - 1
    return datum_body(
        whole[:-1],
        target_tokens=whole[1:],
        logprobs=[0.0] * before + logprobs,
        advantages=[0.0] * before + [advantage] * len(ids),
    )


def work(client: Raw, seed: int, tokens: int) -> list[Any]:
    """A run whose every number is compared."""
    model, found = client.model(seed=seed, rank=4 + seed), list[Any]()
    for step in range(2):
        found.append(model.run(sft_data([[tokens + i for i in range(5)]])))
        found.append(model.step())
        sampler = model.snapshot(step)
        found.append(sampler.sample([tokens], 3, params={"seed": 7, "max_tokens": 6}))
    return found


def test_two_clients_at_once_give_what_each_gives_alone(tmp_path: Path) -> None:
    """Bit for bit, log-probs and norms too."""
    runs: dict[str, list[Any]] = {}

    def alone(name: str, key: str, seed: int, tokens: int) -> None:
        with tinker_server(tmp_path / name) as served:
            runs[name] = work(served.client(key), seed, tokens)

    alone("a", "tml-key-of-a", 1, 2)
    alone("b", "tml-key-of-b", 2, 8)
    with tinker_server(tmp_path / "both") as served:
        clients = {"a": ("tml-key-of-a", 1, 2), "b": ("tml-key-of-b", 2, 8)}
        together: dict[str, list[Any]] = {}

        def run(name: str) -> None:
            key, seed, tokens = clients[name]
            together[name] = work(served.client(key), seed, tokens)

        threads = [threading.Thread(target=run, args=(name,)) for name in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert together == runs
    assert runs["a"] != runs["b"] and isinstance(runs["a"][0], Outputs)
    assert isinstance(runs["a"][2], Samples)


def refused(call: Callable[[], Any]) -> Refused:
    with pytest.raises(Refused) as info:
        call()
    assert "\n" not in info.value.line
    return info.value


def test_another_key_sees_nothing(served: Served, raw: Raw) -> None:
    model = raw.model()
    path = model.do("save_weights", path="mine")["path"]
    named = model.do("save_weights_for_sampler", path="named")["path"]
    sampler, promise = model.snapshot(0), model.begin("optim_step", adam_params={})
    raw.fetch(promise)
    other = served.client("tml-second-key")
    other.open()
    step = {"model_id": model.id, "seq_id": 9, "adam_params": {}}
    calls = {
        "a model": lambda: other.post("optim_step", step),
        "its info": lambda: other.post("get_info", {"model_id": model.id}),
        "a pass": lambda: other.post("forward_backward", pass_body(model.id, 9, sft_data(), "ppo")),
        "a session": lambda: other.post("session_heartbeat", {"session_id": raw.session}),
        "a state": lambda: other.loaded(0, path),
        "a snapshot": lambda: other.sampler(0, named),
        "a path": lambda: other.post("weights_info", {"tinker_path": path}),
        "samples": lambda: type(sampler)(other, sampler.id).sample([2]),
    }
    for what, call in calls.items():
        assert refused(call).status == 404, what
    assert "no such request" in refused(lambda: other.fetch(promise)).line
    runs = other.http.get("/api/v1/training_runs").json()
    assert runs["training_runs"] == [] and runs["cursor"]["total_count"] == 0
    assert raw.http.get("/api/v1/training_runs").json()["cursor"]["total_count"] > 0


def test_keys_are_asked_for_where_there_are_some(tmp_path: Path) -> None:
    with tinker_server(tmp_path, api_keys=("tml-right-key",)) as served:
        assert refused(lambda: served.client("tml-wrong-key").open()).status == 401
        assert served.client("tml-right-key").open()


def test_a_retry_does_nothing_twice(raw: Raw) -> None:
    model = raw.model()
    body = pass_body(model.id, model.number(), sft_data(), "cross_entropy")
    first, again = (raw.post("forward_backward", body) for _ in range(2))
    assert first == again
    step = {"model_id": model.id, "seq_id": model.number(), "adam_params": {}}
    names = {raw.post("optim_step", step)["request_id"] for _ in range(2)}
    (name,) = names
    norm = raw.fetch(name).json()["metrics"]["grad_norm"]
    assert raw.fetch(name).json()["metrics"]["grad_norm"] == norm, "fetched twice"
    assert raw.post("optim_step", step)["request_id"] == name, "also behind the end"
    assert (
        "was another one"
        in refused(
            lambda: raw.post("optim_step", step | {"adam_params": {"learning_rate": 1.0}})
        ).line
    )
    made = {"session_id": raw.session, "model_seq_id": 0, "base_model": "tiny"}
    made |= {"lora_config": {"rank": 4, "seed": 3}}
    assert raw.post("create_model", made)["model_id"] == model.id


def test_requests_run_in_the_order_of_their_numbers(raw: Raw) -> None:
    """The update is sent first, and has the gradient of the batch all the same."""
    model = raw.model()
    step = {"model_id": model.id, "seq_id": 3, "adam_params": {"learning_rate": 0.0}}
    last = raw.post("optim_step", step)["request_id"]
    parts = sft_data()
    second = raw.post("forward_backward", pass_body(model.id, 2, parts[1:], "cross_entropy"))
    first = raw.post("forward_backward", pass_body(model.id, 1, parts[:1], "cross_entropy"))
    for one in (first, second):
        raw.fetch(one["request_id"])
    norm = raw.fetch(last).json()["metrics"]["grad_norm"]
    model.seq = 3
    model.run(parts)
    assert norm == pytest.approx(model.step(lr=0.0), rel=1e-5)


BAD = {
    "there is no loss 'nonsense' here": (sft_data(), "nonsense", None),
    "needs 'weights'": ([datum_body([2], target_tokens=[3])], "cross_entropy", None),
    "token id outside of the vocabulary": (sft_data([[2, 3], [99, 3]]), "cross_entropy", None),
    "'target_tokens' must be token ids": (sft_data([[2, 99]]), "cross_entropy", None),
    "has shape (1,), 'target_tokens' has (2,)": (
        [datum_body([2, 3], target_tokens=[3, 4], weights=[1.0])],
        "cross_entropy",
        None,
    ),
    "does not know 'mask'": (
        [datum_body([2], target_tokens=[3], weights=[1.0], mask=[1.0])],
        "cross_entropy",
        None,
    ),
    "has clip_low_threshold, clip_high_threshold, not 'beta'": (
        [datum_body([2], target_tokens=[3], logprobs=[0.0], advantages=[1.0])],
        "ppo",
        {"beta": 1.0},
    ),
    "not finite": (
        [datum_body([2], target_tokens=[3], weights=[float("nan")])],
        "cross_entropy",
        None,
    ),
    "the request has no data": ([], "cross_entropy", None),
    "513 tokens": (sft_data([[2] * 514]), "cross_entropy", None),
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_pass_is_told_in_one_line_and_changes_nothing(raw: Raw, line: str) -> None:
    data, loss, config = BAD[line]
    model = raw.model()
    assert line in refused(lambda: model.run(data, loss, config=config)).line
    assert model.step() == 0.0


def test_what_a_model_may_not_be(raw: Raw) -> None:
    for number, (lora, line) in enumerate(
        [({"rank": 9}, "above --rank-max 8"), (dict.fromkeys(FLAGS, False), "must be true")]
    ):
        assert line in refused(lambda n=number, given=lora: raw.model(n, **given)).line
    body = {"session_id": raw.session, "model_seq_id": 5, "base_model": "other"}
    body |= {"lora_config": {"rank": 1}}
    name = raw.post("create_model", body)["request_id"]
    assert "this server has one base, 'tiny'" in refused(lambda: raw.fetch(name)).line


FLAGS = ("train_mlp", "train_attn", "train_unembed")


@pytest.mark.parametrize("only", FLAGS)
def test_only_what_was_asked_for_is_trained(raw: Raw, served: Served, only: str) -> None:
    model = raw.model(**(dict.fromkeys(FLAGS, False) | {only: True}))
    before = model.run(sft_data()).loss
    model.step(lr=1e-3)
    assert model.run(sft_data()).loss < before
    trainee = served.service.training.models[model.id].trainee
    assert trainee is not None
    parts = {"train_mlp": "mlp", "train_attn": "self_attn", "train_unembed": "lm_head"}
    assert all(parts[only] in name for name in trainee.adapters())
    scored = model.snapshot(0).score([2, 3, 4, 5, 6])[1:]
    seen = model.run(sft_data([PAIRS[0]]), forward_only=True).logprobs[0]
    assert scored == pytest.approx(seen, abs=1e-5)


def test_sampling_as_it_was_asked_for(raw: Raw) -> None:
    sampler = raw.sampler(0)
    seeded = {"params": {"seed": 4, "max_tokens": 6, "stop": []}}
    first, again = (sampler.sample([2, 3], 3, **seeded) for _ in range(2))
    assert first == again and len(first.token_ids) == 3
    assert len({tuple(ids) for ids in first.token_ids}) > 1, "samples of one seed differ"
    ids = first.token_ids[0]
    stopped = sampler.sample([2, 3], params={"seed": 4, "max_tokens": 6, "stop": [ids[2]]})
    assert stopped.token_ids[0] == ids[: ids.index(ids[2]) + 1] and stopped.stopped == [True]
    greedy = [
        sampler.sample([2, 3], params=one | {"max_tokens": 5, "stop": []}).token_ids
        for one in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6})
    ]
    assert greedy[0] == greedy[1] == greedy[2]
    whole = sampler.score([2, 3, 4])
    part = sampler.sample([2, 3, 4], prompt_logprobs=True, prompt_logprobs_last_n=1).prompt
    assert part is not None and part[2] == whole[2] and part[1] != part[1]
    long = {"params": {"max_tokens": 600}}
    assert "context of 512" in refused(lambda: sampler.sample([2], **long)).line
    assert refused(lambda: sampler.sample([2], params={"temperature": -1})).status == 400
    assert refused(lambda: sampler.sample([2], prompt_alt_tokens_k=2)).status == 400
    assert "vocab" in refused(lambda: sampler.sample([99])).line


def test_states_survive_a_restart_and_go_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    with tinker_server(tmp_path) as served:
        raw = served.client()
        model = raw.model()
        for _ in range(3):
            model.run(sft_data())
            model.step()
        path = model.do("save_weights", path="three")["path"]
        named = model.do("save_weights_for_sampler", path="named")["path"]
        drawn = raw.sampler(5, named).sample([2], params={"seed": 1})
        lost = model.begin("optim_step", adam_params={})
        model.snapshot(0)
        expected = [goes_on(raw.loaded(1, path)), goes_on(raw.loaded(2, path, optimizer=False))]
        assert expected[0] != expected[1]
    with tinker_server(tmp_path) as served:
        raw = served.client()
        assert "lost" in refused(lambda: raw.fetch(lost)).line
        step = {"model_id": model.id, "seq_id": 5, "adam_params": {}}
        gone = refused(lambda: raw.post("optim_step", step))
        assert gone.status == 404 and "create_training_client_from_state" in gone.line
        found = [goes_on(raw.loaded(1, path)), goes_on(raw.loaded(2, path, optimizer=False))]
        assert found == expected
        assert raw.sampler(5, named).sample([2], params={"seed": 1}) == drawn
        names = [version.name for version in (tmp_path / "versions").glob("0*")]
        assert len(names) == 2, "the base and the named one; what had no name went"


def goes_on(model: Any) -> list[float]:
    found = []
    for _ in range(2):
        found += [model.run(sft_data()).loss, model.step()]
    return found


def test_a_session_that_ends_leaves_only_what_was_saved(served: Served, tmp_path: Path) -> None:
    with tinker_server(tmp_path) as one:
        raw = one.client()
        kept, gone = raw.model(0), raw.model(1)
        kept.do("save_weights", path="kept")
        sampler = gone.snapshot(0)
        assert raw.http.post(f"/api/v1/sessions/{raw.session}/finish", json={}).status_code == 200
        assert not one.service.training.models
        assert refused(lambda: sampler.sample([2])).status == 404
        assert refused(lambda: kept.step()).status == 404
        assert [path.name for path in (tmp_path / "models").iterdir()] == [kept.id]
        assert [path.name for path in (tmp_path / "versions").glob("0*")] == ["00000000"]


def limited(tmp_path: Path, **limits: Any) -> Any:
    return tinker_server(tmp_path, limits=replace(LIMITS, **limits))


def test_limits_are_told_by_their_names(tmp_path: Path) -> None:
    with limited(tmp_path, clients_max=1, snapshots_max=2, open_max=3) as served:
        raw = served.client()
        model = raw.model()
        assert "--clients-max" in refused(lambda: raw.model(1)).line
        samplers = [model.snapshot(number) for number in range(3)]
        assert refused(lambda: samplers[0].sample([2])).status == 404
        assert samplers[1].sample([2]) and samplers[2].sample([2])
        waiting = [model.begin("optim_step", adam_params={}) for _ in range(3)]
        full = refused(lambda: model.begin("optim_step", adam_params={}))
        assert full.status == 429 and "3 requests" in full.line
        for name in waiting:
            raw.fetch(name)
        model.seq -= 1  # as the SDK does: the same number again
        assert raw.fetch(model.begin("optim_step", adam_params={}))


def test_the_request_that_others_wait_for_is_taken_where_there_is_no_room(tmp_path: Path) -> None:
    with limited(tmp_path, open_max=2, bytes_max=500) as served:
        raw = served.client()
        model = raw.model()
        step = {"model_id": model.id, "adam_params": {}}
        behind = [raw.post("optim_step", step | {"seq_id": seq}) for seq in (2, 3)]
        for body in (step | {"seq_id": 4}, pass_body(model.id, 5, sft_data() * 9, "ppo")):
            route = "forward_backward" if isinstance(body, bytes) else "optim_step"
            assert refused(lambda r=route, b=body: raw.post(r, b)).status == 429
        whole = raw.post(
            "forward_backward", pass_body(model.id, 1, sft_data() * 9, "cross_entropy")
        )
        for made in (whole, *behind):
            raw.fetch(made["request_id"])
        assert served.service.training.num_bytes == 0


def test_a_client_that_could_not_be_made_takes_no_place(tmp_path: Path) -> None:
    with limited(tmp_path, clients_max=1) as served:
        raw = served.client()
        path = raw.model(0).do("save_weights", path="one")["path"]
        raw.http.post(f"/api/v1/sessions/{raw.session}/finish", json={})
        model, _, name = path.removeprefix("tinker://").partition("/")
        (tmp_path / "models" / model / name / "adapter.safetensors").unlink()
        raw.open()
        assert "is missing" in refused(lambda: raw.loaded(0, path)).line
        assert raw.model(1).step() == 0.0


def test_of_many_sampling_clients_the_oldest_idle_one_goes(tmp_path: Path) -> None:
    with limited(tmp_path, samplers_max=2) as served:
        raw = served.client()
        samplers = [raw.sampler(number) for number in range(3)]
        assert refused(lambda: samplers[0].sample([2])).status == 404
        assert samplers[1].sample([2]) and samplers[2].sample([2])


def test_more_snapshots_than_slots_are_all_sampled(raw: Raw) -> None:
    """Three slots, four snapshots: each gives its own answers, again and again."""
    model, samplers = raw.model(), []
    for number in range(4):
        model.run(sft_data())
        model.step(lr=1e-2)
        samplers.append(model.snapshot(number))
    prompt = [2, 3, 4, 5]
    first = [sampler.score(prompt) for sampler in samplers]
    promises = [
        (index, samplers[index].begin(prompt, prompt_logprobs=True)) for index in [*range(4)] * 2
    ]
    assert len({tuple(one[1:]) for one in first}) == 4
    for index, name in promises:
        found = read_samples(raw.fetch(name).content).prompt
        assert found is not None and found[1:] == first[index][1:]


def test_a_cancelled_sample_is_told_so_and_leaves_the_engine(raw: Raw, served: Served) -> None:
    sampler = raw.sampler(0)
    name = sampler.begin([2], 8, params={"max_tokens": 500, "stop": []})
    raw.post("cancel_future", {"request_id": name})
    assert "gave this request up" in refused(lambda: raw.fetch(name)).line
    assert len(sampler.sample([2], params={"max_tokens": 3, "stop": []}).token_ids[0]) == 3


def test_a_directory_belongs_to_one_base_and_one_server(tmp_path: Path) -> None:
    taken = pytest.raises(UserError, match="another server has this directory")
    with tinker_server(tmp_path), taken, tinker_server(tmp_path):
        pass
    (tmp_path / "base.json").write_text('{"checksum": "of another"}')
    with pytest.raises(UserError, match="belongs to a base"), tinker_server(tmp_path):
        pass


@pytest.mark.parametrize(
    ("version", "status", "warning"),
    [("0.38.0", 200, ""), ("0.38.7", 200, ""), ("0.37.2", 400, ""), ("0.40.0", 200, "tested with")],
)
def test_versions_of_the_sdk(served: Served, version: str, status: int, warning: str) -> None:
    http = served.client().http
    config = http.post("/api/v1/client/config", json={"sdk_version": version})
    assert config.status_code == status
    if status != 200:
        assert "pip install tinker==" in config.json()["error"]["message"]
        return
    body = {"tags": [], "user_metadata": {}, "sdk_version": version}
    made = http.post("/api/v1/create_session", json=body).json()
    assert warning in made.get("warning_message", "") and bool(warning) == (
        "warning_message" in made
    )


def test_names_of_limits_are_those_of_the_command() -> None:
    assert Limits(names=("a",), tokenizer="b").clients_max == 8
