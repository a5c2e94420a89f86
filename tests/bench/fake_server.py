"""A server of OpenAI's completions that makes its answers up; run as a program. Imports nothing of kvboost.

fake_server.py serve MODEL --port N [flags]. How it behaves depends on the flags and on FAKE_SERVER.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

ARGUMENTS = sys.argv[1:]
BEHAVIOUR = os.environ.get("FAKE_SERVER", "")
PORT = int(ARGUMENTS[ARGUMENTS.index("--port") + 1])
STEP_S = 0.01 if "--no-batching" in ARGUMENTS else 0.002
ALONE = asyncio.Lock()
USED = 0


async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    method, path, _ = (await reader.readline()).decode().split()
    length = 0
    while line := (await reader.readline()).strip():
        name, _, value = line.decode().partition(":")
        length = int(value) if name.lower() == "content-length" else length
    if method == "GET":
        await answer(writer, 200 if path in ("/ready", "/health") else 404, {"status": "ok"})
    else:
        await complete(writer, json.loads(await reader.readexactly(length)))
    writer.close()


async def answer(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    content = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()


async def complete(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    global USED
    USED += 1
    if BEHAVIOUR == "full" and USED > 3 and USED % 2:
        await answer(writer, 429, {"error": {"message": "come back later"}})
        return
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    if "--no-batching" in ARGUMENTS:
        async with ALONE:
            await stream(writer, body)
    else:
        await stream(writer, body)


async def stream(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    prompt = body["prompt"]
    for number in range(body["max_tokens"]):
        await asyncio.sleep(STEP_S)
        text = f" {number}"
        await send(writer, {"choices": [{"index": 0, "text": text, "finish_reason": None}]})
        if BEHAVIOUR == "dies" and USED > 5:
            os._exit(3)
        if BEHAVIOUR == "breaks" and USED > 5:
            await send(writer, {"error": {"message": "the step failed"}})
            writer.write(b"0\r\n\r\n")
            return
        if BEHAVIOUR == "cut" and USED > 5:
            writer.write(b"0\r\n\r\n")
            return
        if BEHAVIOUR == "hangs" and USED > 5:
            await asyncio.sleep(600)
    usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
    if "transformers" not in BEHAVIOUR:
        usage["prompt_tokens_details"] = {"cached_tokens": len(prompt) // 2}
    await send(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    await send(writer, {"choices": [], "usage": usage})
    await event(writer, b"[DONE]")
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def send(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    await event(writer, json.dumps(body).encode())


async def event(writer: asyncio.StreamWriter, data: bytes) -> None:
    data = b"data: " + data + b"\n\n"
    half = len(data) // 2
    for part in (data[:half], data[half:]):  # an event may come in pieces
        writer.write(b"%x\r\n%s\r\n" % (len(part), part))
    await writer.drain()


async def main() -> None:
    if BEHAVIOUR == "no_start":
        raise SystemExit("no such model")
    server = await asyncio.start_server(handle, "127.0.0.1", PORT)
    async with server:
        await server.serve_forever()


asyncio.run(main())
