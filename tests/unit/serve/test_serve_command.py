"""`dora-rl serve` as a user starts it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
import torch

from dora_rl.cli import main
from tests.kit.places import MODEL

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
PROGRAM = [sys.executable, "-m", "dora_rl.cli", "serve", str(MODEL), "--port", "0"]


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def none_left_behind():
    yield
    while STARTED:
        STARTED.pop().kill()


def start(
    *options: str, environment: dict[str, str] | None = None
) -> tuple[subprocess.Popen[str], str, list[str]]:
    """The process, its URL and the lines it has said by then."""
    process = subprocess.Popen(
        [*PROGRAM, "--threads", "1", *options],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | (environment or {}),
    )
    STARTED.append(process)
    killer = threading.Timer(600, process.kill)
    killer.daemon = True
    killer.start()
    assert process.stderr is not None
    lines = [process.stderr.readline()]
    assert " at http://" in lines[0], lines[0] + process.stderr.read()
    return process, lines[0].rpartition(" at ")[2].strip(), lines


def test_it_ends_in_order_with_an_answer_on_its_way():
    process, url, _ = start()
    body = {"model": "tiny", "prompt": "03:271\n", "max_tokens": 100, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body | {"stream": True}).encode()
    )
    with urllib.request.urlopen(request) as answer:
        answer.readline()
        process.send_signal(signal.SIGTERM)
        rest = answer.read().decode()
    assert '"finish_reason": "length"' in rest and rest.rstrip().endswith("[DONE]")
    assert process.wait(300) == 0
    assert process.stderr is not None and "stopped" in process.stderr.read()


def test_off_loopback_there_is_always_a_key():
    process, url, _ = start("--host", "0.0.0.0")
    assert process.stderr is not None
    key = process.stderr.readline().rpartition(" ")[2].strip()
    url = url.replace("0.0.0.0", "127.0.0.1")
    try:
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}/models")
        assert caught.value.code == 401
        headers = {"Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{url}/models", headers=headers)
        assert json.load(urllib.request.urlopen(request))["data"][0]["id"] == "tiny"
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(300) == 0


def test_keys_of_a_file_and_of_the_environment(tmp_path):
    """One of several; none of them is in the process list, where everybody could read it."""
    path = tmp_path / "keys"
    path.write_text("first-key-0123\n\n  second-key-0123 \n")
    for environment, options, keys in (
        ({}, ["--api-key-file", str(path)], ["first-key-0123", "second-key-0123"]),
        ({"DORA_RL_API_KEY": "third-key-0123"}, [], ["third-key-0123"]),
    ):
        process, url, _ = start(*options, environment=environment)
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        for key in [*keys, "wrong-key-0123"]:
            assert key.encode() not in shown
            headers = {"Authorization": f"Bearer {key}"}
            request = urllib.request.Request(f"{url}/models", headers=headers)
            if key in keys:
                assert json.load(urllib.request.urlopen(request))["data"]
                continue
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(request)
            assert caught.value.code == 401
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0


@pytest.mark.parametrize("key", ["short", "has a blank in it", "kéy-of-other-letters"])
def test_keys_that_are_none_are_one_line(key, tmp_path, capsys):
    path = tmp_path / "keys"
    path.write_text(f"good-key-0123\n{key}\n")
    assert main(["serve", str(MODEL), "--api-key-file", str(path)]) == 2
    said = capsys.readouterr().err
    assert "printable ASCII" in said and key not in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no/such/model"], "neither a run nor a model"),
        ([str(MODEL), "--version", "3"], "only a run has steps"),
        ([str(MODEL), "--port", "70000"], "--port"),
        ([str(MODEL), "--requests-max", "0"], "--requests-max"),
        ([str(MODEL), "--record", "no/such/folder/a.jsonl"], "--record"),
        ([str(MODEL), "--chat-template", "no.jinja"], "--chat-template"),
        ([str(MODEL), "--host", "192.0.2.1"], "cannot listen"),
        ([str(MODEL), "--api-key", "secret-key"], "--api-key-file FILE"),
        ([str(MODEL), "--api-key-file", "no/such/file"], "--api-key-file no/such/file"),
        ([str(MODEL), "--api-key-file", "/dev/null"], "is empty"),
        ([str(MODEL), "--connections-max", "0"], "--connections-max"),
        ([str(MODEL), "--body-mib-max", "0"], "--body-mib-max"),
        pytest.param([str(MODEL), "--device", "cuda"], "--device: cuda is asked", marks=NO_GPU),
    ],
)
def test_mistakes_are_one_line(arguments, words, capsys):
    assert main(["serve", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and len(said.splitlines()) == 1


def test_a_damaged_model_is_one_line(tmp_path, capsys):
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert main(["serve", str(model), "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "truncated or not safetensors" in said and len(said.splitlines()) == 1
