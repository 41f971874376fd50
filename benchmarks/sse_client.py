"""Many streams at once from a server, read as they come: `python -m benchmarks.sse_client HOST PORT < requests.json`.

A process of its own, without minivllm, so that what it costs is not the server's. stdin: a list of bodies for
/v1/completions, all sent at once. stdout: for each, when it was sent, and when each event with a token came.
"""

import asyncio
import json
import sys
import time

HEAD = "POST /v1/completions HTTP/1.0\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"


async def ask(host: str, port: int, body: dict[str, object], gate: asyncio.Event) -> dict[str, object]:
    """One stream: {"sent": s, "events": [s, ...], "tokens": n}, in seconds of `time.perf_counter`."""
    reader, writer = await asyncio.open_connection(host, port, limit=2**24)
    content = json.dumps(body).encode()
    await gate.wait()
    sent = time.perf_counter()
    writer.write(HEAD.format(length=len(content)).encode() + content)
    events, raw = [], []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            events.append(time.perf_counter())
            raw.append(line)
    writer.close()
    # Read when all is over: what it costs to read them would come between two events.
    parsed = [json.loads(line.removeprefix(b"data: ")) for line in raw]
    if failed := [event for event in parsed if "error" in event]:
        raise RuntimeError(failed[0]["error"]["message"])
    counts = [sum(len(choice["token_ids"]) for choice in event["choices"]) for event in parsed]
    return {"sent": sent, "events": [at for at, n in zip(events, counts) if n], "tokens": sum(counts)}


async def ask_all(host: str, port: int, bodies: list[dict[str, object]]) -> list[dict[str, object]]:
    gate = asyncio.Event()
    asked = [asyncio.create_task(ask(host, port, body, gate)) for body in bodies]
    await asyncio.sleep(0.2)  # all are connected
    gate.set()
    return await asyncio.gather(*asked)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(ask_all(sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)))))
