"""Clients that do what the SDK never does: the others, and what was saved, stay as they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora_rl.chat.access import owner_of
from dora_rl.tinker import wire
from dora_rl.tinker.messages import read_training_pass
from dora_rl.types import UserError
from tests.kit.tinker_server import (
    LIMITS,
    Raw,
    Refused,
    Served,
    datum_body,
    pass_body,
    tinker_server,
)

DATA = [datum_body([2, 3, 4], target_tokens=[3, 4, 5], weights=[1.0] * 3)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tinker_server(tmp_path_factory.mktemp("tinker")) as one:
        yield one


@pytest.fixture
def raw(served: Served) -> Iterator[Raw]:
    client = served.client()
    client.open()
    yield client
    finish(client)


def finish(client: Raw) -> None:
    client.http.post(f"/api/v1/sessions/{client.session}/finish", json={})


def test_a_model_with_the_largest_number_is_saved_found_and_expires(
    raw: Raw, served: Served
) -> None:
    model = raw.model(2**31 - 1)
    path = model.do("save_weights", path="one")["path"]
    assert raw.post("weights_info", {"tinker_path": path})["lora_rank"] == 4
    served.service.states.expire()


def test_a_model_that_is_made_again_stays_what_it_is(tmp_path: Path) -> None:
    """Also when nobody remembers the answer of the first time."""
    with tinker_server(tmp_path) as served:
        raw = served.client()
        model = raw.model()
        model.run(DATA)
        served.service.book.forget(f"{raw.session}:train")
        with pytest.raises(Refused) as info:
            raw.model()
        assert info.value.status == 400
        assert model.step() > 0


def test_clients_that_could_not_be_made_are_forgotten_with_their_session(tmp_path: Path) -> None:
    limits = replace(LIMITS, clients_max=1, open_max=8)
    with tinker_server(tmp_path, limits=limits) as served:
        raw = served.client()
        raw.model()
        body = {"session_id": raw.session, "base_model": "tiny", "lora_config": {"rank": 4}}
        for number in range(1, 9):
            raw.post("create_model", body | {"model_seq_id": number})
        with pytest.raises(Refused) as info:
            raw.post("create_model", body | {"model_seq_id": 9})
        assert info.value.status == 429
        finish(raw)
        assert served.service.book.num_open(f"{raw.session}:train") == 0


def test_a_pass_with_number_0_is_refused(raw: Raw) -> None:
    model = raw.model()
    for number in (0, -1):
        with pytest.raises(Refused) as info:
            raw.post("forward_backward", pass_body(model.id, number, DATA, "cross_entropy"))
        assert info.value.status == 400


def test_the_number_of_a_sampling_client_is_taken_once(raw: Raw) -> None:
    """Otherwise a client would sample from other weights than those that it asked for."""
    model = raw.model()
    named = model.do("save_weights_for_sampler", path="named")["path"]
    base = raw.sampler(1)
    assert raw.sampler(1).id == base.id
    with pytest.raises(Refused, match="400"):
        raw.sampler(1, named)
    sampler = model.snapshot(2)
    assert sampler.sample([2])
    with pytest.raises(Refused, match="client 2 of this session"):
        model.snapshot(2)
    assert sampler.sample([2]) and model.snapshot(3).sample([2])


def test_a_snapshot_without_name_and_number_is_refused(raw: Raw) -> None:
    model = raw.model()
    with pytest.raises(Refused, match="sampling_session_seq_id"):
        model.begin("save_weights_for_sampler")


def test_a_snapshot_is_no_state(raw: Raw) -> None:
    model = raw.model()
    path = model.do("save_weights_for_sampler", path="named")["path"]
    with pytest.raises(Refused, match="snapshot for sampling"):
        model.do("load_weights", path=path, optimizer=False)


def test_an_epsilon_of_zero_is_refused(raw: Raw) -> None:
    """A parameter without a gradient would become 0/0."""
    model = raw.model()
    before = model.run(DATA).loss
    for eps in (0.0, 1e-60):
        with pytest.raises(Refused, match="eps"):
            model.step(eps=eps)
        model.seq -= 1
    model.step(eps=1e-12)
    assert model.run(DATA).loss < before


def test_one_client_cannot_keep_the_queue_from_the_others(tmp_path: Path) -> None:
    """Its requests wait for one that never comes, and have all the room there is."""
    limits = replace(LIMITS, bytes_max=500)
    with tinker_server(tmp_path, limits=limits) as served:
        first, second = served.client(), served.client("tml-second-key")
        model, other = first.model(), second.model()
        for number in (2, 3, 4, 5):
            body = {"model_id": model.id, "seq_id": number, "adam_params": {}}
            try:
                first.post("optim_step", body | {"optimizer_params": {"type": "adamw"}})
            except Refused as error:
                assert error.status == 429
        assert other.run(DATA * 4).logprobs and other.step() > 0


@pytest.mark.parametrize("shape", [[0, 1 << 62], [1 << 62, 0], [1, 1 << 62]])
def test_shapes_of_nothing_are_refused_in_a_line(shape: list[int]) -> None:
    tensor = wire.put_whole(3, 1) + wire.put_wholes(4, shape)
    datum = wire.put_entry(2, "weights", wire.put_bytes(2, tensor))
    with pytest.raises(UserError):
        read_training_pass(pass_body("m", 1, [datum], "ppo"))


def test_sparse_tensors_of_a_request_have_a_limit_together() -> None:
    rows = np.zeros(2, np.int64).tobytes()
    sparse = wire.put_bytes(1, b"") + wire.put_bytes(2, rows) + wire.put_bytes(3, b"")
    tensor = wire.put_bytes(2, sparse) + wire.put_whole(3, 1) + wire.put_wholes(4, [1, 1 << 22])
    datum = wire.put_entry(2, "weights", wire.put_bytes(2, tensor))
    assert read_training_pass(pass_body("m", 1, [datum] * 4, "ppo"))
    with pytest.raises(UserError, match="elements"):
        read_training_pass(pass_body("m", 1, [datum] * 5, "ppo"))


def state(raw: Raw, model: Any, **how: Any) -> str:
    return model.do("save_weights", path="one", **how)["path"]


def test_a_save_that_was_killed_keeps_nobody_from_the_next(tmp_path: Path) -> None:
    with tinker_server(tmp_path) as served:
        raw = served.client()
        model = raw.model()
        path = state(raw, model)
        folder = next(tmp_path.glob("models/*/weights/one"))
        (folder.parent / ".one.old").mkdir()
        (folder.parent / ".one.old" / "state.json").write_text("{}")
        assert state(raw, model, overwrite=True) == path
        assert not (folder.parent / ".one.old").exists()


def test_a_state_that_had_stepped_aside_when_the_server_was_killed_is_there(tmp_path: Path) -> None:
    with tinker_server(tmp_path) as served:
        raw = served.client()
        path = state(raw, raw.model())
    folder = next(tmp_path.glob("models/*/weights/one"))
    folder.rename(folder.with_name(".one.old"))
    folder.with_name(".one.tmp").mkdir()
    with tinker_server(tmp_path) as served:
        assert served.client().loaded(0, path).step() == 0.0
        assert [one.name for one in folder.parent.iterdir()] == ["one"]


def test_a_state_is_deleted_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may be killed in the middle: what is left has no name."""
    with tinker_server(tmp_path) as served:
        raw = served.client()
        path = state(raw, raw.model())
        place, _ = served.service.states.find(
            path, served.service.training.models[raw_model(path)].owner
        )
        gone: list[Path] = []
        monkeypatch.setattr(
            "dora_rl.tinker.states.shutil.rmtree", lambda one, **how: gone.append(one)
        )
        served.service.states.delete(place)
        assert gone and gone[0].name.startswith(".") and gone[0].exists()
        monkeypatch.undo()


def raw_model(path: str) -> str:
    return path.removeprefix("tinker://").partition("/")[0]


def test_answers_that_nobody_fetches_have_a_limit(tmp_path: Path) -> None:
    with tinker_server(tmp_path, limits=replace(LIMITS, answers_bytes_max=100)) as served:
        raw = served.client()
        model = raw.model()
        step = raw.post("optim_step", {"model_id": model.id, "seq_id": 3, "adam_params": {}})
        passes = [pass_body(model.id, seq, DATA, "cross_entropy") for seq in (2, 1)]
        names = [raw.post("forward_backward", body)["request_id"] for body in passes]
        raw.fetch(step["request_id"])  # the others were answered before
        model.seq = 3
        with pytest.raises(Refused, match="answers wait"):
            model.step()
        other = served.client("tml-second-key")
        assert other.model().step() == 0.0
        for name in names:
            raw.fetch(name)
        model.seq = 3
        assert model.step() == 0.0
        assert served.service.book.num_kept(owner_of("tml-first-key")) == 0


def test_a_snapshot_that_got_no_name_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tinker_server(tmp_path) as served:
        states = served.service.states
        model = served.client().model()
        before = states.store.versions()

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(states, "name_snapshot", full)
        with pytest.raises(Refused):
            model.do("save_weights_for_sampler", path="named")
        assert states.store.versions() == before


def test_a_client_whose_session_ends_while_it_is_made_leaves_nothing(tmp_path: Path) -> None:
    with tinker_server(tmp_path) as served:
        raw, states = served.client(), served.service.states
        raw.open()
        making, ended, add = threading.Event(), threading.Event(), states.add_model

        def late(*given: Any) -> None:
            making.set()
            ended.wait(60)
            add(*given)

        states.add_model = late  # type: ignore[method-assign]
        body = {"session_id": raw.session, "model_seq_id": 0, "base_model": "tiny"}
        raw.post("create_model", body | {"lora_config": {"rank": 4}})
        assert making.wait(60)
        finish(raw)
        ended.set()
        states.add_model = add  # type: ignore[method-assign]
        assert served.client("tml-second-key").model().step() == 0.0  # it runs behind the other
        assert raw.http.get("/api/v1/training_runs").json()["training_runs"] == []
