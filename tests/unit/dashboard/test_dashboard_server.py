"""The dashboard over HTTP: who may read, what is pushed and refused, and the audit beside it."""

from __future__ import annotations

import http.client
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from dora_rl.commands.view import RUNS_MAX, runs_in
from dora_rl.core import actions as act
from dora_rl.dashboard.server import FILES, Server, is_loopback
from dora_rl.dashboard.verdict import Verdict
from dora_rl.dashboard.watcher import Watcher
from dora_rl.observe.eventlog import Entry, encode_entry
from dora_rl.types import UserError
from tests.unit.dashboard.made_runs import simulated, write_log


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return simulated()


@contextmanager
def serving(*folders: Path, host: str = "127.0.0.1", token: str = "") -> Iterator[Server]:
    watchers = [Watcher(folder, audit=False) for folder in folders]
    for watcher in watchers:
        watcher.start()
    server = Server(watchers, host, 0, token)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        for watcher in watchers:
            watcher.close()


def ask(server: Server, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    link = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    link.request("GET", path, headers=headers)
    answer = link.getresponse()
    body = answer.read()
    link.close()
    return answer.status, {k.lower(): v for k, v in answer.getheaders()}, body


def test_page_files_and_documents(tmp_path: Path, entries: list[Entry]) -> None:
    write_log(tmp_path, entries)
    with serving(tmp_path) as server:
        for name in ("", *FILES):
            status, headers, body = ask(server, f"/{name}")
            assert status == 200 and body
            assert "default-src 'none'" in headers["content-security-policy"]
        until = time.monotonic() + 20
        while True:
            found = json.loads(ask(server, "/api/overview")[2])
            if found["share_read"] == 1.0 or time.monotonic() > until:
                break
        assert found["num_entries"] == len(entries)
        assert ask(server, "/api/nothing")[0] == 404
        assert ask(server, "/../server.py")[0] == 404
        assert ask(server, "/server.py")[0] == 404


def test_runs_side_by_side(tmp_path: Path, entries: list[Entry]) -> None:
    """Each run answers for itself; the table of all has what each one's overview has."""
    for name, number in (("first", len(entries)), ("second", len(entries) // 2)):
        write_log(tmp_path / name, entries[:number])
    with serving(tmp_path / "first", tmp_path / "second") as server:
        for watcher in server.watchers:
            while watcher.share_read < 1.0:
                watcher.wait(watcher.revision, 20.0)
        shown = json.loads(ask(server, "/api/runs")[2])
        assert [run["name"] for run in shown] == ["first", "second"]
        for number, run in enumerate(shown):
            overview = json.loads(ask(server, f"/api/overview?run={number}")[2])
            # A log without an end falls silent after a while, maybe between the two questions.
            assert {**overview, "status": ""} == {**overview, **run, "status": ""}
        assert shown[0]["step"] > shown[1]["step"] > 0
        assert ask(server, "/api/metrics")[2] == ask(server, "/api/metrics?run=0")[2]
        assert ask(server, "/api/metrics")[2] != ask(server, "/api/metrics?run=1")[2]
        for wrong in ("2", "-1", "x", "1.0"):
            assert ask(server, f"/api/overview?run={wrong}")[0] == 404
            assert ask(server, f"/api/live?run={wrong}")[0] == 404


STRANGE = ("²", "9" * 5000, "-", "--1", "nan", "-inf", "1e999", "٣", "\0", "9" * 20, "-" + "9" * 20)


def test_whatever_is_asked_is_answered(tmp_path: Path, entries: list[Entry]) -> None:
    write_log(tmp_path / "run", entries)
    documents = ("overview", "config", "metrics", "timeline", "groups", "group", "trajectory")
    asked = {"run", "version", "page", "size", "group", "sample", "begin", "end", "width", "order"}
    with serving(tmp_path / "run") as server:
        (watcher,) = server.watchers
        while watcher.share_read < 1.0:
            watcher.wait(watcher.revision, 20.0)
        for name in sorted(asked):
            for number, text in enumerate(STRANGE):
                document = documents[number % len(documents)]
                for one in {document, "groups", "timeline", "trajectory"}:
                    status = ask(server, f"/api/{one}?{name}={quote(text)}")[0]
                    assert status in (200, 404), (one, name, text)


def test_a_run_that_is_removed_takes_no_other_with_it(tmp_path: Path, entries: list[Entry]) -> None:
    for name in ("gone", "there"):
        write_log(tmp_path / name / "events", entries[:200])
    with serving(tmp_path / "gone", tmp_path / "there") as server:
        for watcher in server.watchers:
            while watcher.share_read < 1.0:
                watcher.wait(watcher.revision, 20.0)
        shutil.rmtree(tmp_path / "gone")
        shown = json.loads(ask(server, "/api/runs")[2])
        assert [run["name"] for run in shown] == ["gone", "there"]
        assert shown[0]["status"] == "silent"
        assert ask(server, "/api/overview?run=0")[0] == 200


def test_a_folder_stands_for_the_runs_in_it(tmp_path: Path, entries: list[Entry]) -> None:
    for name in ("b", "a"):
        write_log(tmp_path / "runs" / name / "events", entries[:10])
    (tmp_path / "runs" / "no_run").mkdir()
    (tmp_path / "runs" / "data").mkdir()
    (tmp_path / "runs" / "data" / "train.jsonl").write_text("{}\n")
    folder = tmp_path / "runs"
    assert runs_in([folder]) == [folder / "a", folder / "b"]
    assert runs_in([folder / "b", folder]) == [folder / "b", folder / "a"]
    for empty in ("no_run", "data"):
        with pytest.raises(UserError, match="holds no event log"):
            runs_in([folder / "a", folder / empty])
    with pytest.raises(UserError, match="is not a run directory"):
        runs_in([folder / "missing"])
    for number in range(RUNS_MAX):
        write_log(folder / f"more{number}" / "events", entries[:1])
    with pytest.raises(UserError, match=f"{RUNS_MAX + 2} runs are more than"):
        runs_in([folder])


def test_no_page_elsewhere_can_read_a_run_on_loopback(tmp_path: Path, entries: list[Entry]) -> None:
    write_log(tmp_path, entries)
    with serving(tmp_path) as server:
        assert ask(server, "/api/overview", Host="evil.example:80")[0] == 421
        assert ask(server, "/api/overview", Host="localhost:1")[0] == 200
        assert ask(server, "/api/overview", Host="[::1]:1")[0] == 200


def test_a_token_is_asked_for_where_one_is_needed(tmp_path: Path, entries: list[Entry]) -> None:
    write_log(tmp_path, entries)
    with serving(tmp_path, host="0.0.0.0") as server:
        assert len(server.token) >= 20 and server.token in server.url
        assert ask(server, "/api/overview")[0] == 401
        assert ask(server, "/?token=wrong")[0] == 401
        status, headers, _ = ask(server, f"/?token={server.token}")
        cookie = headers["set-cookie"].partition(";")[0]
        assert status == 200 and "HttpOnly" in headers["set-cookie"]
        assert ask(server, "/api/overview", Cookie=cookie)[0] == 200
        assert ask(server, "/api/overview", Cookie="dora_rl_token=x")[0] == 401
    with serving(tmp_path, token="secret") as server:
        assert ask(server, "/")[0] == 401 and ask(server, "/?token=secret")[0] == 200


def test_what_is_new_is_pushed(tmp_path: Path, entries: list[Entry]) -> None:
    write_log(tmp_path, entries[:100])
    with serving(tmp_path) as server:
        link = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
        link.request("GET", "/api/live")
        answer = link.getresponse()
        assert answer.getheader("Content-Type") == "text/event-stream"
        seen = -1
        while seen < 1:
            line = answer.readline()
            seen = int(line.split()[1]) if line.startswith(b"data:") else seen
        with (tmp_path / "000000000000.jsonl").open("ab") as file:
            file.write(b"".join(map(encode_entry, entries[100:])))
        before = seen
        while seen <= before:
            line = answer.readline()
            seen = int(line.split()[1]) if line.startswith(b"data:") else seen
        link.close()


def test_a_port_in_use_is_one_line(tmp_path: Path, entries: list[Entry]) -> None:
    write_log(tmp_path, entries)
    with serving(tmp_path) as server, pytest.raises(UserError, match="cannot listen on"):
        Server(server.watchers, "127.0.0.1", server.server_address[1])


def test_loopback_names() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "192.168.1.2", "example.org", "localhost.evil")))


def verdict_of(folder: Path) -> dict[str, object]:
    verdict = Verdict(folder)
    until = time.monotonic() + 60
    while verdict.last["state"] == "reading" and time.monotonic() < until:
        time.sleep(0.05)
    verdict.close()
    return verdict.last


def test_the_audit_beside_it_gives_its_verdict(tmp_path: Path, entries: list[Entry]) -> None:
    write_log(tmp_path / "good", entries)
    said = verdict_of(tmp_path / "good")
    assert (said["state"], said["num_findings"]) == ("whole", 0)
    assert said["num_entries"] == len(entries)
    wrong = [
        Entry(e.number, e.now, e.event, [a for a in e.actions if not isinstance(a, act.CloseStep)])
        for e in entries
    ]
    write_log(tmp_path / "bad", wrong)
    said = verdict_of(tmp_path / "bad")
    assert said["num_findings"] and said["findings"]
