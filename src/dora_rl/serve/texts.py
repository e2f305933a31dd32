"""`Texts` in processes of their own: the event loop waits for text and never works on it.

    small bodies ──▶ one process  ┐
    large bodies ──▶ another one  ┴─▶ Ask, token ids, or what is wrong with them

Large texts have a process to themselves, so that small ones never wait behind them. A question that
takes longer than `text_s_max`, or whose process dies over it, is its client's mistake: it is
refused, and the process is replaced. Invariant: no more than `waiting_max` questions wait for a
process, and after a question is given up its process never answers another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from dora_rl.chat.requests import ApiError, Ask, Message, overloaded, server_error, text_too_costly
from dora_rl.serve import KEY_VARIABLE
from dora_rl.serve.text_process import (
    FRAME_BYTES_MAX,
    LENGTH,
    NEXT,
    PROMPT,
    READ,
    Answer,
    TextOptions,
    frame,
)
from dora_rl.types import UserError

SMALL_BYTES_MAX = 256 << 10
START_S_MAX = 120.0


class TextLane:
    """One process, and those who wait for it in order."""

    def __init__(self, options: TextOptions, waiting_max: int) -> None:
        self._options, self._waiting_max = options, waiting_max
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.num_waiting = 0
        self.num_starts = 0

    async def start(self) -> None:
        """Raises `UserError` where the process does not come up."""
        async with self._turn:
            await self._ready()

    async def ask(self, data: bytes) -> Answer:
        """One frame there and one back."""
        if self.num_waiting >= self._waiting_max:
            raise overloaded("texts_waiting_max", self._waiting_max)
        self.num_waiting += 1
        try:
            async with self._turn:
                return await self._ask(data)
        finally:
            self.num_waiting -= 1

    async def _ask(self, data: bytes) -> Answer:
        try:
            await self._ready()
        except UserError as error:
            raise server_error(str(error)) from None
        most_s = self._options.text_s_max
        try:
            reply = await asyncio.wait_for(self._exchange(data), most_s)
        except TimeoutError:
            await self.close()
            took = f"took longer than {most_s:g} s to render and tokenise"
            raise text_too_costly(took) from None
        except (OSError, EOFError):
            await self.close()
            raise text_too_costly("needs too much memory to render and tokenise") from None
        except BaseException:
            await self.close()  # its answer would be taken for the next one's
            raise
        if reply.status:
            raise ApiError(reply.status, reply.message, param=reply.param, code=reply.code)
        return reply

    async def _exchange(self, data: bytes) -> Answer:
        assert self._reader is not None and self._writer is not None
        self._writer.write(data)
        await self._writer.drain()
        (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if size > FRAME_BYTES_MAX:
            raise EOFError
        return msgspec.msgpack.decode(await self._reader.readexactly(size), type=Answer)

    async def _ready(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        await self.close()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "dora_rl.serve.text_process", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={name: text for name, text in os.environ.items() if name != KEY_VARIABLE},
            )
        self.num_starts += 1
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            await asyncio.wait_for(self._exchange(frame(self._options)), START_S_MAX)
        except (OSError, EOFError, TimeoutError):
            await self.close()
            raise UserError("the process that reads texts does not start") from None

    async def close(self) -> None:
        """The process is gone when this returns."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        self._reader = self._writer = None


class TextProcesses:
    """Implements `chat.texts.Texts`."""

    def __init__(self, options: TextOptions, waiting_max: int = 256) -> None:
        self.small, self.large = TextLane(options, waiting_max), TextLane(options, waiting_max)

    async def start(self) -> None:
        await asyncio.gather(self.small.start(), self.large.start())

    async def close(self) -> None:
        await asyncio.gather(self.small.close(), self.large.close())

    async def read(self, endpoint: str, body: bytes, session_id: str | None) -> Ask:
        asked = (await self._ask(READ, endpoint, body, session_id)).ask
        assert asked is not None
        return asked

    async def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Any], options: dict[str, Any]
    ) -> tuple[int, ...]:
        ids = (await self._ask(PROMPT, messages, tools, options)).ids
        assert ids is not None
        return ids

    async def next_ids(
        self,
        before: Sequence[Message],
        after: Sequence[Message],
        tools: Sequence[Any],
        options: dict[str, Any],
        last_id: int,
        end_ids: Collection[int],
    ) -> tuple[int, ...] | None:
        ends = list(end_ids)
        return (await self._ask(NEXT, before, after, tools, options, last_id, ends)).ids

    async def _ask(self, *question: Any) -> Answer:
        data = frame(question)
        lane = self.small if len(data) <= SMALL_BYTES_MAX else self.large
        return await lane.ask(data)
