"""The socket of a server: an answer goes out at once, in however many pieces it is written."""

from __future__ import annotations

import asyncio
import socket

from dora_rl.serve.server import bind


def test_connections_do_not_hold_back_small_pieces() -> None:
    """Otherwise every answer, whose head and body are two pieces, waits 40 ms for the client."""
    found: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        found.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async def main() -> None:
        listening = bind("127.0.0.1", 0)
        port = listening.getsockname()[1]
        async with await asyncio.start_server(answer, sock=listening):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            await reader.read()
            writer.close()

    asyncio.run(main())
    assert found and all(found)
