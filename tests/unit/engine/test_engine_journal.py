"""The journal brings back every request that had not ended, whatever happened to its tail."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_rl.engine.engine import Engine
from dora_rl.engine.journal import Journal, read_journal
from dora_rl.engine.sequence import Request
from dora_rl.types import RequestId, SamplingParams
from tests.kit.engines import Saved, finish_all, make_engine, random_prompts

PARAMS = SamplingParams(tokens_max=24, raw_logprobs=True, stop_ids=(3,))


def submit_all(engine: Engine) -> None:
    for group, prompt in enumerate(random_prompts((5, 18, 33))):
        engine.submit(Request(RequestId(group, 0), 0, prompt, PARAMS, seed=4))


@pytest.mark.parametrize("cut_bytes", [0, 1, 7, 150])
def test_resume_after_a_kill(saved: Saved, tmp_path: Path, cut_bytes: int) -> None:
    _, path = saved("qwen3")
    engine = make_engine(path)
    submit_all(engine)
    expected = finish_all(engine)

    killed = make_engine(path)
    file = tmp_path / "journal"
    killed.journal = Journal(file, every=2)
    submit_all(killed)
    done = {}
    for _ in range(9):
        done |= {o.id: o.trajectory for o in killed.step() if o.trajectory is not None}
    data = file.read_bytes()
    file.write_bytes(data[: len(data) - cut_bytes])

    requests = read_journal(file)
    assert any(request.resume_ids for request in requests)
    heir = make_engine(path)
    for request in requests:
        heir.submit(request)
    done |= finish_all(heir)
    assert done == expected


def test_ended_requests_do_not_come_back(saved: Saved, tmp_path: Path) -> None:
    _, path = saved("qwen3")
    engine = make_engine(path)
    engine.journal = Journal(tmp_path / "journal", every=1000)
    submit_all(engine)
    finish_all(engine)
    # However seldom it is flushed otherwise: an engine without work has said everything.
    assert read_journal(tmp_path / "journal") == []


def test_sessions_and_compaction(saved: Saved, tmp_path: Path) -> None:
    _, path = saved("qwen3")
    prompt = random_prompts((9,))[0]
    key = RequestId(1, 1)

    def begin(journal: Journal | None) -> Engine:
        engine = make_engine(path)
        engine.journal = journal
        params = SamplingParams(tokens_max=6, ignore_eos=True)
        engine.submit(Request(key, 0, prompt, params, keep=True))
        finish_all(engine)
        engine.extend(key, (4, 5))
        return engine

    expected = finish_all(begin(None))[key]
    journal = Journal(tmp_path / "journal", every=1, bytes_max=0)
    killed = begin(journal)
    for _ in range(3):
        killed.step()
    (request,) = read_journal(tmp_path / "journal")
    assert request.resume_mask[6:8] == (0, 0)
    heir = make_engine(path)
    heir.submit(request)
    assert finish_all(heir)[key] == expected
    assert len((tmp_path / "journal").read_bytes().splitlines()) == 1


def test_missing_journal(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "none") == []
