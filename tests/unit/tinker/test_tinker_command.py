"""`dora-rl serve --tinker` as a user starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dora_rl.cli import main
from tests.kit.places import MODEL
from tests.kit.tinker_server import Raw


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no/such/model"], "is no model directory"),
        ([str(MODEL), "--rank-max", "0"], "--rank-max"),
        ([str(MODEL), "--port", "70000"], "--port"),
        ([str(MODEL), "--version", "3"], "--version has no meaning with --tinker"),
        ([str(MODEL), "--record", "a.jsonl"], "--record has no meaning with --tinker"),
        ([str(MODEL), "--api-key", "tml-secret-key"], "--api-key-file FILE"),
        ([str(MODEL), "--host", "192.0.2.1"], "cannot listen"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--tinker", str(tmp_path / "dir"), *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and len(said.splitlines()) == 1


def test_a_key_that_the_sdk_would_not_send_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("tml-good-key\nanother-key\n")
    command = ["serve", "--tinker", str(tmp_path), str(MODEL), "--api-key-file", str(keys)]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "begin with tml-" in said and "another-key" not in said


def test_it_says_where_it_is_and_ends_in_order(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "dora_rl.cli", "serve", "--tinker", str(tmp_path), str(MODEL)]
    process = subprocess.Popen(
        [*program, "--port", "0", "--threads", "1", "--rank-max", "4", "--host", "0.0.0.0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    killer = threading.Timer(300, process.kill)
    killer.start()
    try:
        assert process.stderr is not None
        line, key = process.stderr.readline(), process.stderr.readline().split()[-1]
        assert "'tiny' for the tinker SDK: TINKER_BASE_URL=http://" in line, line
        assert key.startswith("tml-")
        url = line.strip().partition("=")[2].replace("0.0.0.0", "127.0.0.1")
        client = Raw(url, key)
        assert client.model(train_unembed=False).step() == 0.0
        client.http.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0 and "stopped" in process.stderr.read()
    finally:
        process.kill()
        killer.cancel()
