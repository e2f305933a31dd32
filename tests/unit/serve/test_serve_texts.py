"""Texts are read in processes of their own: the same ids, with a deadline and a limit of memory."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys

import pytest

from dora_rl.chat.bounds import CHAT, COMPLETION
from dora_rl.chat.conversation import ChatTemplate
from dora_rl.chat.requests import ApiError
from dora_rl.chat.texts import PlainTexts
from dora_rl.serve.text_process import READ, TextOptions, frame
from dora_rl.serve.texts import TextProcesses
from dora_rl.setup.tokenizer import open_tokenizer
from tests.kit.places import MODEL

USER = [{"role": "user", "content": "03:271\n"}]


def chat(**more) -> bytes:
    return json.dumps({"model": "tiny", "messages": USER} | more).encode()


def with_texts(use, waiting_max=256, **options):
    """Runs `use(texts)` and ends the processes."""

    async def main():
        texts = TextProcesses(TextOptions(str(MODEL), **options), waiting_max)
        await texts.start()
        try:
            return await use(texts)
        finally:
            await texts.close()

    return asyncio.run(main())


async def outcome(work):
    try:
        return await work
    except ApiError as error:
        return error.status, error.code, error.message


def test_they_answer_as_the_plain_ones_do():
    plain = PlainTexts(ChatTemplate(open_tokenizer(MODEL, False)))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": [1, 2.5, None]}}}
    asked = [
        (CHAT, chat(temperature=0.5, stop=["a"], seed=-(2**63)), None),
        (CHAT, chat(tools=[tool], chat_template_kwargs={"x": {"y": [True]}}), None),
        (CHAT, chat(), "session"),
        (COMPLETION, json.dumps({"model": "tiny", "prompt": ["03:", "1"]}).encode(), None),
        (COMPLETION, json.dumps({"model": "tiny", "prompt": [[3, 4], [5]]}).encode(), None),
        (CHAT, chat(top_k=10**30), None),
        (CHAT, b"{", None),
    ]

    async def both(texts):
        for one in asked:
            assert await outcome(texts.read(*one)) == await outcome(plain.read(*one))
        for new in (USER, [{"role": "user", "content": "x" * 400_000}]):
            question = ([*USER], new, (), {}, 3, {1})
            assert await texts.next_ids(*question) == await plain.next_ids(*question)
            assert await texts.prompt_ids(new, (), {}) == await plain.prompt_ids(new, (), {})
        assert texts.small.num_starts == texts.large.num_starts == 1

    with_texts(both)


SLOW = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
FAT = "{{ ('x' * 100000000) | list | length }}"
LONG = "{% for i in range(90000) %}0123456789{% endfor %}"


def test_templates_of_clients_have_a_deadline_and_limits():
    async def use(texts):
        for source, words in ((FAT, "memory"), (LONG, "900000 characters"), (SLOW, "longer than")):
            said = await outcome(texts.read(CHAT, chat(chat_template=source), None))
            assert said[:2] == (400, "text_too_costly") and words in said[2], source
            good = await texts.read(CHAT, chat(), None)  # whoever comes next gets an answer
            assert good.prompts
        assert texts.small.num_starts == 2, "only the deadline costs a process"
        assert texts.large.num_starts == 1

    options = {"chars_max": 100_000, "memory_bytes_max": 96 << 20, "text_s_max": 5.0}
    with_texts(use, client_templates=True, **options)


def test_templates_of_clients_are_refused_without_leave():
    async def use(texts):
        for body in (
            chat(chat_template=SLOW),
            chat(chat_template_kwargs={"chat_template": SLOW}),
        ):
            status, _, message = await outcome(texts.read(CHAT, body, None))
            assert status == 400 and "chat_template" in message

    with_texts(use, text_s_max=5.0)


def test_a_text_that_cannot_fit_is_not_tokenised():
    async def use(texts):
        for text in ("x" * (15 << 20), "x" * 101):
            for endpoint, body in (
                (CHAT, chat(messages=[{"role": "user", "content": text}])),
                (COMPLETION, json.dumps({"model": "m", "prompt": text}).encode()),
            ):
                status, code, message = await outcome(texts.read(endpoint, body, None))
                assert (status, code) == (400, "text_too_costly") and "100 at most" in message
        assert texts.small.num_starts == texts.large.num_starts == 1

    with_texts(use, chars_max=100)


def test_the_line_has_an_end_and_a_gone_client_takes_no_others_answer():
    async def use(texts):
        slow = [asyncio.create_task(texts.read(CHAT, chat(chat_template=SLOW), None))]
        while not texts.small.num_waiting:
            await asyncio.sleep(0)
        slow.append(asyncio.create_task(texts.read(CHAT, chat(), None)))
        await asyncio.sleep(0)
        status, code, _ = await outcome(texts.read(CHAT, chat(), None))
        assert (status, code) == (503, "texts_waiting_max")
        slow[0].cancel()  # it is being worked on
        with pytest.raises(asyncio.CancelledError):
            await slow[0]
        ids = (await slow[1]).prompts
        assert ids == ((await texts.prompt_ids(USER, (), {})),)
        assert texts.small.num_waiting == 0 and texts.small.num_starts == 2

    with_texts(use, 2, client_templates=True)


def test_small_texts_do_not_wait_behind_large_ones():
    async def use(texts):
        large = chat(chat_template=SLOW, user="x" * (1 << 20))
        slow = asyncio.create_task(texts.read(CHAT, large, None))
        while not texts.large.num_waiting:
            await asyncio.sleep(0)
        assert (await texts.read(CHAT, chat(), None)).prompts
        assert not slow.done() and texts.large.num_waiting == 1
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow

    with_texts(use, client_templates=True, text_s_max=600.0)


def test_a_process_whose_server_was_killed_does_not_go_on_for_ever():
    """It is asked for something endless, and nobody is there who would kill it."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "dora_rl.serve.text_process", str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    try:
        with ours:
            options = TextOptions(str(MODEL), client_templates=True, text_s_max=0.0)
            ours.sendall(frame(options))
            assert ours.recv(1 << 16)
            ours.sendall(frame([READ, CHAT, chat(chat_template=SLOW), None]))
        assert process.wait(120) == -signal.SIGALRM
    finally:
        process.kill()
        process.wait()
