"""The figures of a comparison, from hand-written logs whose answers can be worked out on paper."""

from __future__ import annotations

import json

import pytest

from dora_rl.bench.paradigms import Window, read_log, run_figures
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import Params
from dora_rl.observe.eventlog import FileLog
from dora_rl.types import Finish, Mode, RequestId, Segment, UserError

PARAMS = Params(mode=Mode.SYNC, batch_groups=1, group_size=1, num_steps=4, inflight_groups=2)
STEP_S = 10.0
WINDOW = Window(1, 3)


def dispatch(group, instance):
    return act.Dispatch(instance, group, group, 0, (0,), (0,), False)


def finished(group, instance):
    return ev.SampleFinished(RequestId(group, 0), 0, instance, 5, Finish.STOP, (Segment(0, 0),))


def write_run(folder):
    """Four steps of ten seconds; a request runs on the first of two instances for four of them.

    Groups 0 to 3 are trained, group 4 is issued and ends as surplus.
    """
    log = FileLog.create(folder / "events")
    log.append(0.0, ev.Started(PARAMS), [])
    log.append(0.0, ev.InstanceJoined("a", 8), [])
    log.append(0.0, ev.InstanceJoined("b", 8), [])
    for step in range(4):
        start = step * STEP_S
        issue = act.IssueGroup(step, step, step, step)
        log.append(start + 1, ev.Tick(), [issue, dispatch(step, "a")])
        log.append(start + 5, finished(step, "a"), [])
        end = act.EndGroup(step, step, act.End.TRAINED, step, "")
        log.append(start + STEP_S, ev.StepCommitted(step, "x"), [end])
    extra = [act.IssueGroup(4, 4, 3, 3), act.EndGroup(4, 3, act.End.SURPLUS, None, "slow")]
    log.append(41.0, ev.Tick(), extra)
    log.close()
    lines = [
        {
            "step": step,
            "train/tokens": 100.0 * (step + 1),
            "time/train": 2.5,
            "time/weight_sync": 0.5,
            "staleness/mean": 1.0,
            "response_length/mean": 5.0,
            "response_length/p99": 9.0,
        }
        for step in range(4)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "staleness_max": 1,
        "mixed_version_frac": 0.0,
        "discarded_tokens": 7,
        "reward_last": 0.5,
        "migrations": 0,
    }
    (folder / "summary.json").write_text(json.dumps(summary))


def test_speed_and_idleness_are_those_of_the_window(tmp_path):
    write_run(tmp_path)
    figures = run_figures(tmp_path, WINDOW, lambda prompt: 1.0)
    assert figures["steady_s"] == pytest.approx(30.0)
    assert figures["tokens_per_s"] == pytest.approx((200 + 300 + 400) / 30)
    assert figures["tokens_per_s_whole"] == pytest.approx(1000 / 39)
    assert figures["trainer_idle_ratio"] == pytest.approx(0.75)
    # Four of ten seconds, on one of two instances.
    assert figures["rollout_idle_ratio"] == pytest.approx(1 - 0.4 / 2)
    assert figures["requests_mean"] == pytest.approx(1.0)


def test_length_bias_compares_what_was_trained_with_what_was_issued(tmp_path):
    write_run(tmp_path)
    # Prompt 4, the one that was left out, is the long one.
    lengths = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 6.0}
    assert run_figures(tmp_path, WINDOW, lengths.get)["length_bias"] == pytest.approx(0.5)
    assert run_figures(tmp_path, WINDOW, lambda prompt: 3.0)["length_bias"] == 1.0
    assert run_figures(tmp_path, WINDOW, lambda prompt: None)["length_bias"] is None


def test_a_sleeping_instance_is_idle(tmp_path):
    log = FileLog.create(tmp_path / "events")
    log.append(0.0, ev.Started(PARAMS), [])
    log.append(0.0, ev.InstanceJoined("a", 8), [act.IssueGroup(0, 0, 0, 0), dispatch(0, "a")])
    log.append(10.0, ev.StepCommitted(0, "x"), [])
    log.append(12.0, ev.Tick(), [act.Sleep("a")])
    log.append(17.0, ev.Tick(), [act.Wake("a")])
    log.append(20.0, finished(0, "a"), [])
    log.append(20.0, ev.StepCommitted(1, "x"), [])
    log.close()
    assert read_log(tmp_path / "events", Window(1, 1)).rollout_idle_ratio == pytest.approx(0.5)


def test_a_moved_request_is_busy_where_it_went(tmp_path):
    log = FileLog.create(tmp_path / "events")
    log.append(0.0, ev.Started(PARAMS), [])
    log.append(0.0, ev.InstanceJoined("a", 8), [act.IssueGroup(0, 0, 0, 0), dispatch(0, "a")])
    log.append(0.0, ev.InstanceJoined("b", 8), [])
    log.append(10.0, ev.StepCommitted(0, "x"), [])
    log.append(14.0, ev.Moved(RequestId(0, 0), 0, "a", "b", 1, 1), [])
    log.append(18.0, finished(0, "b"), [])
    log.append(20.0, ev.StepCommitted(1, "x"), [])
    log.close()
    figures = read_log(tmp_path / "events", Window(1, 1))
    assert figures.rollout_idle_ratio == pytest.approx(1 - (4 + 4) / 20)


def test_a_run_that_stopped_early_is_refused(tmp_path):
    write_run(tmp_path)
    with pytest.raises(UserError, match="did not commit step 9"):
        run_figures(tmp_path, Window(1, 9), lambda prompt: None)


def test_a_window_needs_steps_between_start_and_drain():
    assert Window.of(10, 2, 3) == Window(3, 7)
    assert Window.of(6, 2, 3) == Window(3, 3)
    with pytest.raises(UserError, match="5 steps are too few"):
        Window.of(5, 2, 3)


def test_an_instance_that_comes_back_keeps_its_time_and_loses_its_requests(tmp_path):
    log = FileLog.create(tmp_path / "events")
    log.append(0.0, ev.Started(PARAMS), [])
    log.append(0.0, ev.InstanceJoined("a", 8), [act.IssueGroup(0, 0, 0, 0), dispatch(0, "a")])
    log.append(10.0, ev.StepCommitted(0, "x"), [])
    log.append(13.0, ev.InstanceJoined("a", 8, life=1), [])
    log.append(20.0, ev.StepCommitted(1, "x"), [])
    log.close()
    figures = read_log(tmp_path / "events", Window(1, 1))
    assert figures.rollout_idle_ratio == pytest.approx(0.7)
