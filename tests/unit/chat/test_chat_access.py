"""Who may ask: hosts, origins, keys and the sessions behind them."""

from __future__ import annotations

import pytest

from dora_rl.chat.access import Access, Caller, name_of, session_named
from dora_rl.chat.requests import ApiError

LOCAL = Access(loopback=True, hosts=("gpu-box.lan",))


@pytest.mark.parametrize(
    "host",
    ["localhost:8000", "127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST", "GPU-box.lan"],
)
def test_loopback_and_allowed_names_are_ours(host):
    LOCAL.check_host({"host": host})
    LOCAL.check_host({"host": host, "origin": f"http://{host}"})


@pytest.mark.parametrize(
    "host", ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "10.0.0.1",
             "evil.example:127.0.0.1", "[::1", "0.0.0.0", "localhost:80@evil.example",
             "[::1]@evil.example", "localhost@evil.example", "localhost:80:80"]
)  # fmt: skip
def test_other_names_are_not(host):
    with pytest.raises(ApiError) as caught:
        LOCAL.check_host({"host": host} if host else {})
    assert caught.value.status == 421 and "--allowed-host" in caught.value.message


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "",
        "https://127.0.0.1.evil.example",
        "http://evil.example/#://localhost",
        "http://localhost:x@evil.example",
        "localhost",
    ],
)
def test_pages_of_others_may_not_ask(origin):
    with pytest.raises(ApiError) as caught:
        LOCAL.check_host({"host": "localhost", "origin": origin})
    assert caught.value.status == 403


def test_off_loopback_names_count_only_where_some_are_allowed():
    Access().check_host({"host": "anything.example"})
    named = Access(hosts=("models.example",))
    named.check_host({"host": "models.example:8000"})
    with pytest.raises(ApiError):
        named.check_host({"host": "localhost"})


def test_names_are_read_without_their_port():
    assert name_of("[::1]:80") == "::1" and name_of("A.b:80") == "a.b" and name_of("") == ""


def test_each_key_is_an_owner_that_does_not_give_it_away():
    access = Access(keys=("first key", "second key"))
    first, second = (access.caller(f"Bearer {key}") for key in ("first key", "second key"))
    assert first.owner != second.owner and "key" not in first.owner
    assert access.caller("bearer  first key") == first
    for header in (
        "",
        "Bearer",
        "Bearer first",
        "Basic first key",
        "Bearer first key2",
        "Bearer \xff",
    ):
        with pytest.raises(ApiError) as caught:
            access.caller(header)
        assert caught.value.status == 401


def test_without_keys_everybody_is_one_owner():
    assert Access().caller("Bearer whatever") == Caller("", None)


def test_a_key_that_stands_for_a_session_has_no_other():
    keys: dict[str, str] = {}
    access = Access(sessions=keys)
    with pytest.raises(ApiError):
        access.caller("Bearer k1")
    keys |= {"k1": "one", "k2": "two"}  # as episodes open
    caller = access.caller("Bearer k1")
    assert session_named(caller, None) == session_named(caller, "one") == "one"
    with pytest.raises(ApiError) as caught:
        session_named(caller, "two")
    assert caught.value.status == 404
