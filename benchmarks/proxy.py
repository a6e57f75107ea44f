"""How much the proxy adds: latency, requests/s and memory under load, with rendering and recording included.

    python benchmarks/proxy.py                       # the table: 1, 64, 1,024 and 4,096 connections, two prompt lengths
    python benchmarks/proxy.py --against http://127.0.0.1:8000/v1    # the same load on another proxy, and the ratio
    python benchmarks/proxy.py --turns 100           # cost of each call as one conversation grows

Each request of a connection repeats a conversation of twelve messages whose last one is new, as an agent's next call
does: the last twelfth of the prompt is tokenised each time. The engine is a fake one that answers at once, so that
everything measured is the proxy's own: HTTP, parsing, chat template, tokenisation, reading the answer, recording
(journal included), writing the response. The server runs in one process, the load comes from another over keep-alive
connections, each connection a rollout of its own. Latency at N connections is the whole time from request to answer
while N are under way (closed loop). "CPU ms/request" is the server process's own time: on a machine that does other
things as well it says more than requests/s.
"""

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
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
    urls = [server.open(opened(number)).base_url for number in range(connections)]
    began = time.process_time()
    print(READY + json.dumps(urls), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    cpu = time.process_time() - began
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    calls = sum(len(rollout.capture.session.records) for rollout in server.rollouts.values())
    print(READY + json.dumps({"peak_mb": peak, "calls": calls, "cpu_ms": 1e3 * cpu / max(1, calls)}), flush=True)
    await server.stop()


# --- the load ---


class Connection(asyncio.Protocol):
    """One keep-alive connection that sends the same request again and again, and reads answers by their length."""

    def __init__(self, request: bytes, latencies: list[float], until: float, failures: list[str]) -> None:
        self.request, self.latencies, self.until, self.failures = request, latencies, until, failures
        self.done = asyncio.get_running_loop().create_future()
        self.buffer = bytearray()
        self.number = 0

    def connection_made(self, transport) -> None:
        self.transport = transport
        self._send()

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
            self.transport.close()

    def connection_lost(self, error) -> None:
        if self.buffer or error:
            self.failures.append(f"connection lost: {error}")
        self.done.set_result(None)


async def load(urls: list[str], tokens: int, connections: int, seconds: float) -> dict:
    """Closed loop over `connections`; latencies in seconds."""
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    failures: list[str] = []
    began = time.perf_counter()
    waiting = []
    for number in range(connections):
        parts = urlsplit(urls[number % len(urls)])
        body = body_of(tokens, number)
        head = (f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nAuthorization: Bearer x\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n")
        make = partial(Connection, head.encode() + body, latencies, began + seconds, failures)
        _, protocol = await loop.create_connection(make, parts.hostname, parts.port)
        waiting.append(protocol.done)
    await asyncio.gather(*waiting)
    wall = time.perf_counter() - began
    latencies.sort()
    return {"requests": len(latencies), "per_second": len(latencies) / wall, "failures": failures,
            "p50_ms": 1e3 * latencies[len(latencies) // 2], "p99_ms": 1e3 * latencies[int(len(latencies) * 0.99)]}


def with_server(tokens: int, connections: int, seconds: float) -> dict:
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(connections)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_LOGGING_LEVEL": "ERROR"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        urls = [url + "/v1" for url in json.loads(answer_of(process))]
        result = run_load(urls, tokens, connections, seconds)
        process.stdin.write("\n")
        process.stdin.flush()
        return result | json.loads(answer_of(process))


def answer_of(process: subprocess.Popen) -> str:
    for line in process.stdout:
        if line.startswith(READY):
            return line[len(READY):]
    raise RuntimeError("the server ended before it was ready")


def run_load(urls: list[str], tokens: int, connections: int, seconds: float) -> dict:
    import uvloop

    return uvloop.run(load(urls, tokens, connections, seconds))


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
    """Milliseconds of each part of one call, one after the other, without HTTP."""
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
    again = iter(range(10**9))

    def render() -> None:
        number = b"%08d" % next(again)
        capture._build(dialect.read(body.replace(COUNTER, number, 1), capture.session))

    costs = {
        "parse": time_of(lambda: dialect.read(body, capture.session), repeat),
        "parse and render": time_of(render, repeat),
        "answer": time_of(lambda: dialect.answer(asked, exchange, 0), repeat),
        "record": time_of(lambda: capture.session.record(sampled), repeat),
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


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--against", help="base URL (ending in /v1) of another OpenAI-compatible proxy")
    arguments.add_argument("--connections", type=int, nargs="*", default=[1, 64, 1024, 4096])
    arguments.add_argument("--tokens", type=int, nargs="*", default=[1000, 32000])
    arguments.add_argument("--seconds", type=float, default=10)
    arguments.add_argument("--turns", type=int, default=100)
    arguments.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.serve:
        import uvloop

        uvloop.run(serve(options.serve))
        return
    print(f"{os.cpu_count()} cores; {ANSWER_TOKENS} tokens an answer; {options.seconds:g} s each")
    columns = "tokens  connections  requests/s  CPU ms/request   p50 ms   p99 ms  peak MB  failures"
    print("\n" + columns + ("  other/s  ratio" if options.against else ""))
    for tokens in options.tokens:
        for connections in options.connections:
            row = with_server(tokens, connections, options.seconds)
            line = (f"{tokens:6d}  {connections:11d}  {row['per_second']:10.0f}  {row['cpu_ms']:14.2f}  "
                    f"{row['p50_ms']:7.1f}  {row['p99_ms']:7.1f}  {row['peak_mb']:7.0f}  {len(row['failures']):8d}")
            if options.against:
                other = run_load([options.against], tokens, connections, options.seconds)
                line += f"  {other['per_second']:7.0f}  {row['per_second'] / other['per_second']:5.2f}"
            print(line, flush=True)
            for failure in row["failures"][:3]:
                print("   failed:", failure, flush=True)
    for tokens in options.tokens:
        costs = asyncio.run(stages(tokens))
        listed = ", ".join(f"{name} {cost:.3f} ms" for name, cost in costs.items())
        print(f"\ncost by stage, {tokens} tokens: {listed}")
        print(f"recording costs {costs['record'] / costs['render']:.1%} of rendering")
    if options.turns:
        costs = asyncio.run(turns(options.turns))
        marks = [turn for turn in (1, 10, 25, 50, 75, 100) if turn <= len(costs)]
        print("\ncost of a call by turn: " + ", ".join(f"{turn}: {costs[turn - 1]:.2f} ms" for turn in marks))


if __name__ == "__main__":
    main()
