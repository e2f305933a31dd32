"""Promises: a retry does nothing twice, and what is kept is bounded."""

from __future__ import annotations

import pytest

from dora_rl.tinker.book import Answer, Book
from dora_rl.types import UserError


def answered(book: Book, seq: int, size: int = 1, scope: str = "m") -> str:
    promise = book.promise("me", (scope, seq), b"body")
    promise.answer = Answer(b"x" * size)
    return promise.id


def test_the_same_request_gets_the_same_promise() -> None:
    book = Book("boot")
    promise = book.promise("me", ("m", 1), b"body")
    assert book.known(("m", 1), b"body") is promise and book.known(("m", 2), b"body") is None
    with pytest.raises(UserError, match="request 1 of m was another one"):
        book.known(("m", 1), b"other")


def test_only_the_owner_finds_it() -> None:
    book = Book("boot")
    promise = book.promise("me", ("m", 1), b"body")
    assert book.find(promise.id, "me") is promise and book.find(promise.id, "you") is None
    assert not book.is_of_another_start(promise.id) and book.is_of_another_start("other-1")


@pytest.mark.parametrize("limits", [{"kept_max": 2}, {"bytes_max": 20}])
def test_what_was_fetched_is_kept_for_a_while_and_nothing_else_is_dropped(
    limits: dict[str, int],
) -> None:
    book = Book("boot", **limits)
    names = [answered(book, seq, size=10) for seq in range(1, 6)]
    assert book.num_open("m") == 5
    for name in names[:4]:
        promise = book.find(name, "me")
        assert promise is not None
        book.fetched(promise)
        book.fetched(promise)  # again: it is there still
    assert [book.find(name, "me") is None for name in names] == [True, True, False, False, False]
    assert book.num_open("m") == 1
    assert book.known(("m", 1), b"another") is None, "its number is free again"


def test_a_scope_is_forgotten_as_a_whole() -> None:
    book = Book("boot")
    mine, other = answered(book, 1), answered(book, 1, scope="n")
    book.forget("m")
    assert book.find(mine, "me") is None and book.find(other, "me") is not None
    assert book.num_open("m") == 0 and book.num_open("n") == 1
