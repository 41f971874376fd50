"""Many streams at once from a server, read as they come: `python -m benchmarks.sse_client HOST PORT < requests.json`.

A process of its own, without minivllm, so that what it costs is not the server's. stdin: a list of bodies for
/v1/completions, all sent at once. stdout: for each, when it was sent, and when each event with a token came.
"""

import asyncio
import json
import sys
import time
from collections.abc import Iterator

LINES = ("POST /v1/completions HTTP/1.1", "host: x", "connection: close", "content-type: application/json")


class Reading(asyncio.Protocol):
    """One connection. While others are read, too, what comes is only noted.

    parts   when each came, in seconds of `time.perf_counter`, and its bytes
    ended   is done once the server has closed the connection
    """

    def __init__(self) -> None:
        self.parts: list[tuple[float, bytes]] = []
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(error)

    def events(self) -> Iterator[tuple[float, dict[str, object]]]:
        """(when its end came, the event). The server sends each in a chunk of its own, so lines are whole."""
        rest = b""
        for at, data in self.parts:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield at, json.loads(line.removeprefix(b"data: "))


async def ask(host: str, port: int, body: dict[str, object], gate: asyncio.Event) -> tuple[float, Reading]:
    """One stream, to its end: when it was asked for, and what came."""
    transport, reading = await asyncio.get_running_loop().create_connection(Reading, host, port)
    content = json.dumps(body).encode()
    head = "\r\n".join((*LINES, f"content-length: {len(content)}", "", ""))
    await gate.wait()
    sent = time.perf_counter()
    transport.write(head.encode() + content)
    await reading.ended
    return sent, reading


def told(sent: float, reading: Reading) -> dict[str, object]:
    """{"sent": s, "events": [s, ...], "tokens": n}, in seconds of `time.perf_counter`."""
    events = list(reading.events())
    if failed := [event for _, event in events if "error" in event]:
        raise RuntimeError(failed[0]["error"]["message"])
    counts = [sum(len(choice["token_ids"]) for choice in event["choices"]) for _, event in events]
    return {"sent": sent, "events": [at for (at, _), n in zip(events, counts) if n], "tokens": sum(counts)}


async def ask_all(host: str, port: int, bodies: list[dict[str, object]]) -> list[dict[str, object]]:
    gate = asyncio.Event()
    asked = [asyncio.create_task(ask(host, port, body, gate)) for body in bodies]
    await asyncio.sleep(0.2)  # all are connected
    gate.set()
    return [told(*found) for found in await asyncio.gather(*asked)]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ask_all(sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)))))
