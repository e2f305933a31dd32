"""What the SDK sends, as it was recorded (`tests/tinker_sdk/record.py`), sent again without it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dora_rl.tinker import SDK_VERSION
from dora_rl.tinker.messages import read_training_pass
from tests.kit.places import ROOT
from tests.kit.tinker_server import (
    Outputs,
    Samples,
    datum_body,
    pass_body,
    read_outputs,
    read_samples,
    tinker_server,
)

RECORD = json.loads((ROOT / "tests" / "vectors" / "tinker_sdk.json").read_text())
SESSION = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def bodies(path: str) -> list[bytes]:
    found = [entry for entry in RECORD["log"] if entry["path"].endswith(path)]
    return [bytes.fromhex(entry["body"]) for entry in found]


def test_the_record_is_of_the_version_that_this_is_for() -> None:
    assert RECORD["sdk"] == SDK_VERSION


def test_passes_are_read_as_the_sdk_writes_them() -> None:
    passes = [read_training_pass(body) for body in bodies("/forward_backward")]
    first = passes[0]
    assert (first.loss, first.seq, first.forward_only, len(first.data)) == (
        "cross_entropy",
        1,
        False,
        2,
    )
    assert first.data[1].token_ids.tolist() == [7, 8, 9]
    assert first.data[1].inputs["target_tokens"].tolist() == [8, 9, 10]
    assert first.data[1].inputs["weights"].tolist() == [0.0, 1.0, 1.0]
    wide = next(one for one in passes if one.forward_only)
    assert wide.data[0].inputs["target_tokens"].tolist() == [[3] + [0] * 7, [4, 5] + [0] * 6]
    assert wide.data[0].inputs["weights"][1].tolist() == [0.5, 0.5] + [0.0] * 6
    ppo = next(one for one in passes if one.loss == "ppo")
    assert ppo.config == {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


def test_our_client_of_the_tests_writes_what_the_sdk_writes() -> None:
    (first, *_) = bodies("/forward_backward")
    data = [
        datum_body([2, 3, 4, 5], target_tokens=[3, 4, 5, 6], weights=[1.0] * 4),
        datum_body([7, 8, 9], target_tokens=[8, 9, 10], weights=[0.0, 1.0, 1.0]),
    ]
    ours = read_training_pass(pass_body("m", 1, data, "cross_entropy"))
    theirs = read_training_pass(first)
    for mine, other in zip(ours.data, theirs.data, strict=True):
        assert mine.token_ids.tolist() == other.token_ids.tolist()
        assert {n: v.tolist() for n, v in mine.inputs.items()} == {
            n: v.tolist() for n, v in other.inputs.items()
        }


def answer_of(response: Any) -> Any:
    """Read in the form that it came in."""
    if "protobuf" not in response.headers["content-type"]:
        return response.json()
    is_pass = response.content.find(b"ArrayRecord") == 2  # its first field
    return read_outputs(response.content) if is_pass else read_samples(response.content)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], Any]]:
    """Each request, and what came of it; ids are those of this start."""
    found: list[tuple[dict[str, Any], Any]] = []
    promises: dict[str, str] = {}
    names: dict[str, str] = {}

    def ours(text: str) -> str:
        for theirs, mine in (*names.items(), *promises.items()):
            text = text.replace(theirs, mine)
        return text

    with tinker_server(tmp_path_factory.mktemp("tinker")) as served:
        http = served.client().http
        for entry in RECORD["log"]:
            body = entry["body"]
            if "protobuf" in entry["type"]:
                (name,) = names.items()
                content = bytes.fromhex(body).replace(name[0].encode(), name[1].encode())
            else:
                content = ours(body).encode()
            how = {"content": content, "headers": {"Content-Type": entry["type"]}}
            response = http.request(entry["method"], ours(entry["path"]), **how)
            assert response.status_code == entry["status"], (entry, response.text)
            assert response.headers["content-type"] == entry["answer_type"], entry
            answer = answer_of(response)
            if isinstance(answer, dict):
                assert sorted(answer) == entry["keys"], (entry, answer)
                if entry["promise"] is not None:
                    promises[entry["promise"]] = answer["request_id"]
                if entry["path"].endswith("create_session"):
                    names[_session_of(RECORD)] = answer["session_id"]
            found.append((entry, answer))
    return found


def _session_of(record: Any) -> str:
    finish = next(one for one in record["log"] if one["path"].endswith("/finish"))
    (name,) = SESSION.findall(finish["path"])
    return name


def answers(replayed: list[tuple[dict[str, Any], Any]], kind: type) -> list[Any]:
    return [answer for _, answer in replayed if isinstance(answer, kind)]


def test_every_request_is_answered_in_the_form_the_sdk_expects(replayed: Any) -> None:
    """The fixture compares status, type and keys of each."""
    assert len(replayed) == len(RECORD["log"]) > 40


def test_the_loss_falls_from_update_to_update(replayed: Any) -> None:
    losses = [one.loss for one in answers(replayed, Outputs)[:3]]
    assert losses[0] > losses[1] > losses[2] > 0


def test_what_was_asked_of_samples_is_there(replayed: Any) -> None:
    drawn, scored = answers(replayed, Samples)[:2]
    assert len(drawn.token_ids) == 2 and all(1 <= len(ids) <= 5 for ids in drawn.token_ids)
    assert [value != value for value in drawn.prompt] == [True, False, False]
    assert [value != value for value in scored.prompt] == [True, True, False]
    assert scored.prompt[2] == drawn.prompt[2]


def test_files_are_where_they_are_said_to_be(tmp_path: Path) -> None:
    """One more talk, so that its directory can be looked at."""
    with tinker_server(tmp_path) as served:
        model = served.client().model()
        path = model.do("save_weights", path="mine")["path"]
        assert path == f"tinker://{model.id}/weights/mine"
        assert (tmp_path / "models" / model.id / "weights" / "mine" / "state.json").is_file()
