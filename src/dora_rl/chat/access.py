"""Who may ask: names of hosts, origins of web pages, keys.

On loopback only a loopback name, or one that the user allowed, is taken for `Host`, and for the
`Origin` that browsers send: a page elsewhere, which may have pointed its own name at this machine,
cannot ask. Keys are compared in constant time. Decides and never answers. Invariant: every request
that it lets through has an owner, and sessions belong to owners.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from dora_rl.chat.requests import ApiError, session_not_found, unauthorized
from dora_rl.io.connection import is_loopback

SESSION_HEADER = "x-session-id"
AUTHORITY = re.compile(r"(?:\[(?P<inside>[^]]*)\]|(?P<name>[^:]*))(?::[0-9]*)?")


class Caller(NamedTuple):
    """`owner` stands for a key; `session`: the one that the key stands for, if it does."""

    owner: str
    session: str | None


@dataclass(frozen=True, slots=True)
class Access:
    """No `keys` and no `sessions` (key -> its session): everybody may ask. `loopback`: the server
    listens there alone; `hosts` are further names, and where there are some, all others are
    refused on every address."""

    keys: Sequence[str] = ()
    sessions: Mapping[str, str] | None = None
    hosts: Sequence[str] = ()
    loopback: bool = False
    _owners: dict[str, str] = field(init=False, default_factory=dict[str, str])

    def __post_init__(self) -> None:
        self._owners.update({key: owner_of(key) for key in self.keys})

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Raises `ApiError` where the request is meant for another host, or comes from a page of
        another one."""
        if not self.loopback and not self.hosts:
            return
        host = name_of(headers.get("host", ""))
        if not self._is_ours(host):
            message = "this server does not have that Host; allow it with --allowed-host NAME"
            raise ApiError(421, message, code="unknown_host")
        origin = headers.get("origin")
        if origin is not None and not self._is_ours(name_of(origin.partition("://")[2])):
            message = "pages of that Origin may not ask; allow its host with --allowed-host NAME"
            raise ApiError(403, message, code="unknown_origin")

    def caller(self, header: str) -> Caller:
        """By the header `Authorization`; raises `ApiError`."""
        kind, _, given = header.partition(" ")
        given = given.strip() if kind.lower() == "bearer" else ""
        if self.sessions is None and not self.keys:
            return Caller("", None)
        key = matching(given, self.keys if self.sessions is None else self.sessions)
        if key is None:
            raise unauthorized(bool(header))
        if self.sessions is not None:
            return Caller(key, self.sessions[key])
        return Caller(self._owners[key], None)

    def any_of(self, headers: Sequence[str]) -> Caller:
        """By the first of them that has a key; raises what the last one does."""
        for header in headers[:-1]:
            with suppress(ApiError):
                return self.caller(header)
        return self.caller(headers[-1])

    def _is_ours(self, name: str) -> bool:
        return (self.loopback and is_loopback(name)) or name in self.hosts


def session_named(caller: Caller, named: str | None) -> str | None:
    """The session that a request is about. A key that stands for one has no other."""
    if caller.session is not None and named not in (None, caller.session):
        raise session_not_found(named)
    return named or caller.session


def matching(given: str, known: Iterable[str]) -> str | None:
    """The key that was given. Every known one is looked at to its end, whichever it is."""
    found = None
    for key in list(known):
        if hmac.compare_digest(given.encode(), key.encode()):
            found = key
    return found


def owner_of(key: str) -> str:
    """A name for whoever has the key, which does not give it away."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def name_of(authority: str) -> str:
    """The name in `name:port` or `[::1]:port`, as it is compared; empty where it is neither."""
    found = AUTHORITY.fullmatch(authority)
    return (found["inside"] or found["name"] or "").lower() if found else ""
