"""A fuzz of the server, beside a client that behaves; see `serve_fuzz.py`."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("openai")  # with the rest of what serving is tested with
from tests.unit.serve import serve_fuzz

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


def test_two_hundred_requests():
    findings = serve_fuzz.run(200, seed=11, num_clients=2, num_streams=8)
    assert not findings.wrong, "\n".join(findings.wrong[:10])
    assert {200, 400, 404} <= set(findings.statuses)


@pytest.mark.full
def test_twenty_thousand_requests():
    findings = serve_fuzz.run(20_000, seed=1, num_clients=4, num_streams=64)
    assert not findings.wrong, "\n".join(findings.wrong[:10])
    assert sum(findings.statuses.values()) > 15_000


def shot(**more):
    settings = {"method": "POST", "path": "/v1/completions", "body": b"{}", "headers": {}}
    return serve_fuzz.Shot(**(settings | more))


NAMED = b'{"error": {"code": "connections_max", "param": "top_k"}}'


@pytest.mark.parametrize(
    ("made", "status", "data", "headers"),
    [
        (shot(), 500, b"{}", {}),
        (shot(), 503, b"{}", {}),
        (shot(), 503, NAMED, {}),
        (shot(unfit={"n"}), 200, b"{}", {}),
        (shot(unfit={"n"}), 400, NAMED, {}),
        (shot(stream=True), 200, b'data: {"error": {"code": "x"}}', {}),
        (shot(stream=True), 200, b'data: {"type": "error", "code": "x"}', {}),
    ],
)
def test_the_fuzz_can_find_something(made, status, data, headers):
    assert serve_fuzz.judge(made, status, data, headers)
    assert not serve_fuzz.judge(shot(unfit={"top_k"}), 400, NAMED, {})
    assert not serve_fuzz.judge(shot(), 503, NAMED, {"retry-after": "1"})
    none = b'data: {"type": "response.created", "response": {"error": null}}'
    assert not serve_fuzz.judge(shot(stream=True), 200, none, {})


def test_growth_is_found():
    warm = {"rss_mib": 100, "threads": 4, "files": 10}
    assert not serve_fuzz.grown(warm, warm | {"rss_mib": 100 + serve_fuzz.RSS_MIB_MAX})
    for more in ({"rss_mib": 200}, {"threads": 5}, {"files": 20}):
        (line,) = serve_fuzz.grown(warm, warm | more)
        assert next(iter(more)) in line
