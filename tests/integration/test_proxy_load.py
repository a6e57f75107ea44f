"""Ten thousand requests at once through one proxy."""

import asyncio
import json
import resource
import sys

import pytest

from tests.unit.proxy_parts import codec_of, proxy_of, rollout

CROWD = """
import asyncio, json, sys
import aiohttp

async def main(urls, count):
    timeout = aiohttp.ClientTimeout(total=280)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
        async def ask(number):
            body = {"messages": [{"role": "user", "content": f"Number {number}."}]}
            async with http.post(urls[number % len(urls)] + "/v1/chat/completions", json=body) as response:
                return (await response.json())["choices"][0]["message"]["content"]
        answers = await asyncio.gather(*(ask(number) for number in range(count)))
    print(json.dumps(sorted(set(answers))))

asyncio.run(main(*json.load(sys.stdin)))
"""


async def test_ten_thousand_requests_at_once():
    """Through one proxy with an engine that answers only when all have arrived: no error, bounded memory.

    The crowd is a process of its own: each side needs 10,000 file descriptors.
    """
    count, rollouts = 10_000, 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count + 500:
        pytest.skip(f"needs {count + 500} file descriptors, this machine allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 500), hard))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    server, engine = proxy_of(codec_of("chatml"), lambda request: "Said.", max_concurrent_calls=64)
    engine.hold = asyncio.Event()
    await server.start()
    urls = [server.open(rollout(f"r{number}")).base_url for number in range(rollouts)]
    crowd = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CROWD, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    said = asyncio.create_task(crowd.communicate(json.dumps([urls, count]).encode()))
    while len(engine.requests) < count and not said.done():
        await asyncio.sleep(0.1)
    engine.hold.set()
    assert json.loads((await said)[0]) == ["Said."]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    calls = [call for number in range(rollouts) for call in await server.finish(f"r{number}")]
    await server.stop()
    assert len(calls) == count and not any(call.masked for call in calls)
    assert grown < 800_000, f"{grown} KiB for {count} requests at once"
