"""A live run: newer versions go live beside older ones, sessions stay where they began."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kit.places import MODEL

openai = pytest.importorskip("openai")
from dora_rl.config import ModelConfig, RunConfig  # noqa: E402
from dora_rl.weights.store import DiskWeightStore  # noqa: E402
from tests.unit.serve.serving import ENGINE, serving, wait_until  # noqa: E402

FIRST, SECOND = "03:271\n", "02:513\n"


def seal(run: Path, version: int) -> None:
    """Version 0 is the shipped model; each other one is its own small step away from it."""
    generator = torch.Generator().manual_seed(version)
    tensors = load_file(MODEL / "model.safetensors")
    for tensor in tensors.values():
        noise = torch.randn(tensor.shape, generator=generator) * 0.05 * bool(version)
        tensor += noise * tensor.std() if tensor.numel() > 1 else 0
    DiskWeightStore(run / "weights").publish(version, tensors.items())


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "events").mkdir(parents=True)
    config = RunConfig(model=ModelConfig(path=str(MODEL)))
    (folder / "config.json").write_text(config.model_dump_json())
    seal(folder, 0)
    return folder


def ask(client, messages, session=None, model="tiny"):
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        logprobs=True,
        max_tokens=40,
        extra_body={"session_id": session} if session else None,
    )
    logprobs = [entry.logprob for entry in answer.choices[0].logprobs.content]
    return answer.weight_version, answer.choices[0].message.content, logprobs


def user(text):
    return {"role": "user", "content": text}


def test_a_session_stays_on_its_version_while_a_newer_one_is_live(run):
    with serving(run) as running:
        client = running.client()
        version, text, logprobs = ask(client, [user(FIRST)], "old")
        assert version == 0
        seal(run, 1)
        wait_until(lambda: running.service.live == 1, "version 1 is live")
        stays = "1 sessions stay on version 0"
        wait_until(lambda: any(stays in line for line in running.said), "that is said")
        # New requests and sessions are on the new one, and it is another policy.
        assert ask(client, [user(FIRST)])[0] == ask(client, [user(FIRST)], "new")[0] == 1
        assert ask(client, [user(FIRST)])[2] != logprobs
        # The old session goes on under the old weights, and both can be asked for by name.
        more = [user(FIRST), {"role": "assistant", "content": text}, user(SECOND)]
        version, _, second = ask(client, more, "old")
        assert version == 0
        DiskWeightStore(run / "weights").retire(0)  # the run has moved on; the server has its copy
        assert ask(client, [user(FIRST)], model="tiny@0")[2] == logprobs
        assert [model.id for model in client.models.list()] == ["tiny", "tiny@0", "tiny@1"]
        with pytest.raises(openai.BadRequestError, match="on version 0"):
            ask(client, more, "old", model="tiny@1")
        assert running.client().get("/sessions/old", cast_to=dict)["logprobs"][-1] == second[-1]
        # With its last session the old version goes.
        client.delete("/sessions/old", cast_to=dict)
        names = lambda: [model.id for model in client.models.list()]  # noqa: E731
        wait_until(lambda: names() == ["tiny", "tiny@1"], "version 0 is retired")
        wait_until(lambda: running.engine.versions() == (1,), "its slot is free")


def test_the_newest_waits_for_a_place_and_skips_what_it_missed(run):

    engine = ENGINE.model_copy(update={"versions_max": 2})
    with serving(run, engine=engine) as running:
        client = running.client()
        assert ask(client, [user(FIRST)], "zero")[0] == 0
        seal(run, 1)
        wait_until(lambda: running.service.live == 1, "version 1 is live")
        assert ask(client, [user(FIRST)], "one")[0] == 1
        seal(run, 2)
        seal(run, 3)
        assert ask(client, [user(FIRST)])[0] == 1, "both places are taken by sessions"
        client.delete("/sessions/zero", cast_to=dict)
        wait_until(lambda: running.service.live == 3, "version 3 is live")
        assert ask(client, [user(FIRST)])[0] == 3 and running.engine.versions() == (1, 3)


def test_a_damaged_version_is_said_and_passed_over(run):
    with serving(run) as running:
        seal(run, 1)
        wait_until(lambda: running.service.live == 1, "version 1 is live")
        generator = [("model.norm.weight", torch.ones(128))]
        DiskWeightStore(run / "weights").publish(2, generator)
        wait_until(lambda: any("cannot be loaded" in line for line in running.said), "it is said")
        assert ask(running.client(), [user(FIRST)])[0] == 1
        seal(run, 3)
        wait_until(lambda: running.service.live == 3, "version 3 is live")
        assert len([line for line in running.said if "cannot be loaded" in line]) == 1


def test_idle_sessions_end(run):
    with serving(run, session_idle_s_max=0.0) as running:
        ask(running.client(), [user(FIRST)], "short")
        wait_until(lambda: running.service.num_sessions_on(0) == 0, "the session has ended")
        wait_until(lambda: running.engine.stats().idle == 0, "its KV is free")
