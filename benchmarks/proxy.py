"""How much the proxy adds: latency, requests/s and memory under load, with rendering and recording included.

    python benchmarks/proxy.py                       # the table: 1, 64, 1,024 and 4,096 connections, two prompt lengths
    python benchmarks/proxy.py --against http://127.0.0.1:8000/v1    # the same load on another proxy, and the ratio
    python benchmarks/proxy.py --upstream 8100       # serves what another proxy can be put in front of
    python benchmarks/proxy.py --json FILE           # all figures as one JSON object, too

Each request of a connection repeats a conversation of twelve messages whose last one is new, as an agent's next call
does: the last twelfth of the prompt is tokenised each time. The engine is a fake one that answers at once, so that
everything measured is the proxy's own: HTTP, parsing, chat template, tokenisation, reading the answer, recording
(journal included), writing the response. The server runs in one process, the load comes from another over keep-alive
connections, each connection a rollout of its own. Latency at N connections is the whole time from request to answer
while N are under way (closed loop), so the mean is N / (requests/s).

"bare/s" is the same load on an aiohttp server that reads the body and answers the same without doing anything: what
the load generator, the kernel and aiohttp allow on this machine; "added" is what the proxy's latency has more than that
server's. "CPU ms" is the server process's own time for each
request: on a machine that does other things as well it says more than requests/s.
"""

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lightning_ray.proxy.keeper import allow_descriptors  # noqa: E402

ANSWER_TOKENS = 32
COUNTER = b"00000000"
"""Stands in a request where its number goes."""
WORDS = "the answer is in the file and the file is here for value in values total "
READY = "READY "


def body_of(tokens: int, number: int) -> bytes:
    """A Chat Completions request of about so many tokens, in twelve messages, unlike those of other connections."""
    filler = WORDS * (tokens // 16 + 1)
    size = tokens * len(WORDS) // 16 // 12
    messages = [{"role": "system", "content": f"You are rollout {number}. " + filler[:size]}]
    for turn in range(11):
        number_of_request = COUNTER.decode() if turn == 10 else str(turn)
        content = f"{number_of_request} " + filler[turn:turn + size]
        messages.append({"role": ("user", "assistant")[turn % 2], "content": content})
    return json.dumps({"model": "policy", "messages": messages}).encode()


# --- the server, in a process of its own ---


def make_server(journal: bool):
    """A proxy whose engine answers at once, and its codec."""
    import numpy as np

    from lightning_ray.config import PolicyConfig, ProxyConfig
    from lightning_ray.generator.request import Generation
    from lightning_ray.proxy.codec import Codec
    from lightning_ray.proxy.engine import Engine
    from lightning_ray.proxy.rollouts import ProxyServer
    from tests.unit.proxy_parts import model_dir

    directory = Path(mkdtemp(prefix="proxy-benchmark-"))
    model = model_dir("hermes", directory)
    codec = Codec(model, PolicyConfig(path=model, tool_parser="hermes", max_context=65536))
    ids = np.asarray([300 + n % 50 for n in range(ANSWER_TOKENS - 1)] + [codec.tokenizer.eos_token_id], np.int32)

    class Instant:
        async def generate(self, request):
            return Generation(ids, np.zeros(ANSWER_TOKENS, np.float32), np.zeros(ANSWER_TOKENS, np.int32), "stop")

        async def abort(self, request_id):
            pass

    config = ProxyConfig(journal=journal)
    return ProxyServer(codec, Engine([Instant()]), config, "policy", directory / "journal"), codec


def opened(number: int):
    from lightning_ray.config import SamplingConfig
    from lightning_ray.proxy.endpoint import OpenRollout

    return OpenRollout(f"r{number}", mode="train", sampling=SamplingConfig(), seed=number, max_calls=10**9)


async def serve(connections: int) -> None:
    server, _ = make_server(journal=True)
    await server.start()
    gc.collect()
    gc.freeze()  # as the actor does
    urls = [server.open(opened(number)).base_url + "/v1" for number in range(connections)]
    await measured(urls, lambda: sum(len(rollout.capture.session.records) for rollout in server.rollouts.values()))
    await server.stop()


async def serve_bare(port: int) -> None:
    """Reads requests and answers them, with no thought in between."""
    from aiohttp import web

    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "the answer " * 8}}
    usage = {"prompt_tokens": 1, "completion_tokens": ANSWER_TOKENS, "total_tokens": 1 + ANSWER_TOKENS}
    answer = json.dumps({"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": "policy",
                         "choices": [choice], "usage": usage}).encode()
    answered = 0

    async def handler(request: web.BaseRequest) -> web.Response:
        nonlocal answered
        await request.read()
        answered += 1
        return web.Response(body=answer, headers={"Content-Type": "application/json"})

    def make_request(*parts) -> web.BaseRequest:
        return web.BaseRequest(*parts, asyncio.get_running_loop(), client_max_size=2**26)

    http = web.Server(handler, request_factory=make_request, access_log=None)
    listening = await asyncio.get_running_loop().create_server(http, "127.0.0.1", port, backlog=4096)
    await measured([f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"], lambda: answered)


async def measured(urls: list[str], count) -> None:
    """Says where the server is; when told to end, what it cost. `count()` is how many requests were answered."""
    began = time.process_time()
    print(READY + json.dumps(urls), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    cpu = time.process_time() - began
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    print(READY + json.dumps({"peak_mb": peak, "cpu_ms": 1e3 * cpu / max(1, count())}), flush=True)


# --- the load ---


class Connection(asyncio.Protocol):
    """One keep-alive connection that sends the same request again and again, and reads answers by their length."""

    def __init__(self, request: bytes, latencies: list[float], failures: list[str]) -> None:
        self.request, self.latencies, self.failures = request, latencies, failures
        self.done: asyncio.Future | None = None
        self.buffer = bytearray()
        self.number = 0

    def connection_made(self, transport) -> None:
        self.transport = transport

    def ask(self, until: float) -> asyncio.Future:
        """Ask once, and again until that time (`time.perf_counter`); done with the last answer."""
        self.until, self.done = until, asyncio.get_running_loop().create_future()
        self._send()
        return self.done

    def _send(self) -> None:
        self.number += 1
        self.sent = time.perf_counter()
        self.transport.write(self.request.replace(COUNTER, b"%08d" % self.number, 1))

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head = self.buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        header = bytes(self.buffer[:head]).lower()
        at = header.find(b"content-length:")
        if at >= 0:
            length = int(header[at + 15:].split(b"\r\n", 1)[0])
            if len(self.buffer) < head + 4 + length:
                return
        elif not self.buffer.endswith(b"0\r\n\r\n"):
            return
        now = time.perf_counter()
        if not header.startswith(b"http/1.1 200"):
            self.failures.append(bytes(self.buffer[:300]).decode(errors="replace"))
        self.latencies.append(now - self.sent)
        self.buffer.clear()
        if now < self.until:
            self._send()
        else:
            self.done.set_result(None)

    def connection_lost(self, error) -> None:
        if not self.done.done():
            self.failures.append(f"connection lost: {error}")
            self.done.set_result(None)


async def load(urls: list[str], tokens: int, connections: int, seconds: float) -> dict:
    """Closed loop over `connections`. The first request of each, which meets a rollout that knows nothing yet, is not
    counted."""
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    failures: list[str] = []
    protocols = []
    for number in range(connections):
        parts = urlsplit(urls[number % len(urls)])
        body = body_of(tokens, number)
        head = (f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer x\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n")
        make = partial(Connection, head.encode() + body, latencies, failures)
        protocols.append((await loop.create_connection(make, parts.hostname, parts.port))[1])
    await asyncio.gather(*(protocol.ask(until=0) for protocol in protocols))
    latencies.clear()
    began = time.perf_counter()
    await asyncio.gather(*(protocol.ask(until=began + seconds) for protocol in protocols))
    wall = time.perf_counter() - began
    for protocol in protocols:
        protocol.transport.close()
    latencies.sort()
    return {"requests": len(latencies), "per_second": len(latencies) / wall, "failures": failures[:3],
            "failed": len(failures), "p50_ms": 1e3 * latencies[len(latencies) // 2],
            "p99_ms": 1e3 * latencies[int(len(latencies) * 0.99)]}


@contextmanager
def server_process(*arguments: str):
    """A server in a process of its own: gives its URLs, and fills `cost` when it has ended."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_LOGGING_LEVEL": "ERROR"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        cost: dict[str, float] = {}
        yield answer_of(process), cost
        process.stdin.write("\n")
        process.stdin.flush()
        cost |= answer_of(process)


def answer_of(process: subprocess.Popen):
    for line in process.stdout:
        if line.startswith(READY):
            return json.loads(line[len(READY):])
    raise RuntimeError("the server ended before it was ready")


def run_load(urls: list[str], tokens: int, connections: int, seconds: float) -> dict:
    import uvloop

    return uvloop.run(load(urls, tokens, connections, seconds))


def row_of(tokens: int, connections: int, seconds: float, against: str | None) -> dict:
    """One line of the table."""
    with server_process("--serve", str(connections)) as (urls, cost):
        result = run_load(urls, tokens, connections, seconds)
    with server_process("--upstream", "0") as (urls, _):
        bare = run_load(urls, tokens, connections, seconds / 2)
    row = {"tokens": tokens, "connections": connections, **result, **cost, "bare_per_second": bare["per_second"],
           "added_p50_ms": result["p50_ms"] - bare["p50_ms"], "added_p99_ms": result["p99_ms"] - bare["p99_ms"]}
    if against:
        row["other"] = run_load([against], tokens, connections, seconds)
        row["ratio"] = row["per_second"] / row["other"]["per_second"]
    return row


# --- cost by stage, and by turn ---


def time_of(work, repeat: int) -> float:
    """Median milliseconds."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1e3 * sorted(times)[len(times) // 2]


async def stages(tokens: int, repeat: int = 200) -> dict[str, float]:
    """Milliseconds of each part of one call, one after the other, without HTTP. Recording is the bookkeeping, and the
    journal's notes of what the engine is asked and of what it answered."""
    from lightning_ray.proxy.session import Sent

    server, _ = make_server(journal=True)
    await server.start()
    server.open(opened(0))
    capture = server.rollouts["r0"].capture
    dialect = server.front.dialects["/v1/chat/completions"]
    body = body_of(tokens, 0)
    asked = dialect.read(body, capture.session)
    exchange, task = capture.begin(asked, body, dialect.name, retried=False)
    await task
    sampled = capture.session.records[0]
    numbers = iter(range(10**9))

    def read():
        return dialect.read(body.replace(COUNTER, b"%08d" % next(numbers), 1), capture.session)

    def record() -> None:
        capture.session.send(exchange, Sent(dialect.name, [(sampled.parent, sampled.new_ids, sampled.relation)]))
        capture.session.record(sampled)

    asked_anew = [read() for _ in range(repeat)]
    costs = {
        "parse": time_of(read, repeat),
        "render": time_of(lambda: capture._build(asked_anew.pop()), repeat),
        "answer": time_of(lambda: dialect.answer(asked, exchange, 0), repeat),
        "record": time_of(record, repeat),
    }
    await server.stop()
    return costs


async def turns(count: int) -> list[float]:
    """Milliseconds of each call (parse to answer, without HTTP) of one conversation that grows by 300 tokens a turn."""
    server, _ = make_server(journal=True)
    await server.start()
    server.open(opened(0))
    capture = server.rollouts["r0"].capture
    dialect = server.front.dialects["/v1/chat/completions"]
    messages = [{"role": "user", "content": "Begin."}]
    costs = []
    for turn in range(count):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        began = time.perf_counter()
        asked = dialect.read(body, capture.session)
        exchange, task = capture.begin(asked, body, dialect.name, retried=False)
        await task
        answer = json.loads(dialect.answer(asked, exchange, 0))
        costs.append(1e3 * (time.perf_counter() - began))
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"{turn} " + WORDS * 18}]
    relations = {record.relation for record in capture.session.records[1:]}
    if relations != {"continued"}:
        raise RuntimeError(f"the conversation was not continued: {relations}")
    await server.stop()
    return costs


def table(row: dict) -> str:
    line = (f"{row['tokens']:6d}  {row['connections']:11d}  {row['bare_per_second']:6.0f}  {row['per_second']:10.0f}  "
            f"{row['cpu_ms']:6.2f}  {row['p50_ms']:7.1f}  {row['p99_ms']:7.1f}  {row['added_p50_ms']:9.1f}  "
            f"{row['added_p99_ms']:9.1f}  {row['peak_mb']:7.0f}  {row['failed']:6d}")
    if "other" in row:
        other = row["other"]
        line += f"  {other['per_second']:7.0f}  {other['p99_ms']:9.1f}  {other['failed']:6d}  {row['ratio']:5.1f}"
    return "\n   failed: ".join([line, *row["failures"]])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--against", help="base URL (ending in /v1) of another OpenAI-compatible proxy")
    arguments.add_argument("--upstream", type=int, metavar="PORT", help="serve a bare OpenAI-compatible endpoint")
    arguments.add_argument("--connections", type=int, nargs="*", default=[1, 64, 1024, 4096])
    arguments.add_argument("--tokens", type=int, nargs="*", default=[1000, 32000])
    arguments.add_argument("--seconds", type=float, default=10)
    arguments.add_argument("--turns", type=int, default=100)
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write all figures here too")
    arguments.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    allow_descriptors()
    if options.serve or options.upstream is not None:
        asyncio.run(serve(options.serve) if options.serve else serve_bare(options.upstream))
        return
    say = partial(print, flush=True)
    say(f"{os.cpu_count()} cores; {ANSWER_TOKENS} tokens an answer; {options.seconds:g} s each\n")
    say("tokens  connections  bare/s  requests/s  CPU ms   p50 ms   p99 ms  added p50  added p99  peak MB  failed"
        + ("  other/s  other p99  failed  ratio" if options.against else ""))
    figures: dict = {"rows": [], "stages_ms": {}, "turns_ms": []}
    for tokens in options.tokens:
        for connections in options.connections:
            figures["rows"].append(row_of(tokens, connections, options.seconds, options.against))
            say(table(figures["rows"][-1]))
    for tokens in options.tokens:
        costs = figures["stages_ms"][tokens] = asyncio.run(stages(tokens))
        say(f"\ncost by stage, {tokens} tokens: " + ", ".join(f"{name} {cost:.3f} ms" for name, cost in costs.items()))
        say(f"recording costs {costs['record'] / costs['render']:.1%} of rendering")
    if options.turns:
        costs = figures["turns_ms"] = asyncio.run(turns(options.turns))
        marks = [turn for turn in (1, 10, 25, 50, 75, 100) if turn <= len(costs)]
        say("\ncost of a call by turn: " + ", ".join(f"{turn}: {median_around(costs, turn):.2f} ms" for turn in marks))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def median_around(costs: list[float], turn: int) -> float:
    """Of the call and its neighbours: one alone may have been interrupted."""
    near = sorted(costs[max(0, turn - 3):turn + 2])
    return near[len(near) // 2]


if __name__ == "__main__":
    main()
