"""The proxy as a Ray actor, with scripted generator actors: endpoints, namespaces, and generators that die."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import numpy as np
import openai
import pytest
import ray

from lightning_ray.config import PolicyConfig, ProxyConfig, SamplingConfig
from lightning_ray.generator.request import Generation
from lightning_ray.proxy.actor import Proxy
from lightning_ray.proxy.endpoint import OpenRollout
from tests.unit.proxy_parts import model_dir, tokenizer_of


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)
class Scripted:
    """A generator whose answers are always the same words. It dies at its first call, where `marker` does not exist
    yet; the first call that asks it to wait is never answered, only claimed."""

    def __init__(self, words: str, marker: str | None = None) -> None:
        self.tokenizer = tokenizer_of("hermes")
        self.ids = [*self.tokenizer.encode(words, add_special_tokens=False), self.tokenizer.eos_token_id]
        self.marker = marker
        self.waits: str | None = None

    async def generate(self, request) -> Generation:
        if self.marker and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os._exit(1)
        if self.waits is None and "Wait" in self.tokenizer.decode(request.prompt_ids):
            self.waits = request.request_id
            await asyncio.Event().wait()
        return self.said(len(self.ids), "stop")

    def said(self, size: int, finish_reason: str) -> Generation:
        ids = np.asarray(self.ids[:size], np.int32)
        return Generation(ids, np.zeros(size, np.float32), np.zeros(size, np.int32), finish_reason)

    async def waiting(self) -> bool:
        return self.waits is not None

    async def abort(self, request_id: str) -> None:
        pass

    async def claim(self, request_id: str) -> Generation | None:
        return self.said(2, "abort") if request_id == self.waits else None


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_dir("hermes", tmp_path_factory.mktemp("models"))


def opened(name: str) -> OpenRollout:
    return OpenRollout(name, mode="train", sampling=SamplingConfig(), seed=1, max_calls=10)


@pytest.fixture(scope="module")
def generator(ray_session, tmp_path_factory):
    actor = Scripted.remote("The same words.", str(tmp_path_factory.mktemp("marker") / "died"))
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def proxy(generator, model, tmp_path_factory):
    policy = PolicyConfig(path=model, tool_parser="hermes", max_context=4096)
    actor = Proxy.remote(ProxyConfig(), policy, str(model), [generator], str(tmp_path_factory.mktemp("journal")))
    assert ray.get(actor.start.remote())[1] > 0
    yield actor
    ray.get(actor.stop.remote())
    ray.kill(actor)


async def test_law4_a_generator_that_dies_is_waited_for(proxy):
    endpoint = await proxy.open.remote(opened("dies"))
    client = openai.AsyncOpenAI(base_url=endpoint.base_url + "/v1", api_key="x", max_retries=0)
    answer = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Go"}])
    assert answer.choices[0].message.content == "The same words."
    (call,) = await proxy.finish.remote("dies")
    assert call.masked is None and len(call.sampled_ids) == len(call.logprobs)
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Go"}])
    await client.close()


async def test_law1_law8_the_proxy_is_killed_and_the_harness_goes_on(proxy, generator):
    """Kill the actor's process while a call is in flight: the client's own retry is all it takes, and what had been
    sampled for that call is counted."""
    endpoint = await proxy.open.remote(opened("killed"))
    client = openai.AsyncOpenAI(base_url=endpoint.base_url + "/v1", api_key="x", max_retries=2, timeout=120)
    messages = [{"role": "user", "content": "Go"}]
    one = await client.chat.completions.create(model="policy", messages=messages)
    messages += [{"role": "assistant", "content": one.choices[0].message.content}, {"role": "user", "content": "Wait"}]
    asked = asyncio.create_task(client.chat.completions.create(model="policy", messages=messages))
    while not await generator.waiting.remote():
        await asyncio.sleep(0.01)
    os.kill(await proxy.pid.remote(), signal.SIGKILL)
    two = await asked
    assert two.choices[0].message.content == "The same words."
    await client.close()
    calls = sorted(await proxy.finish.remote("killed"), key=lambda call: (call.masked is not None, call.index))
    assert [(call.relation, call.parent, call.masked) for call in calls] == [
        ("new_conversation", None, None), ("continued", 0, None), ("continued", 0, "cancelled"),
    ]
    assert len(calls[2].sampled_ids) == 2 and calls[1].prompt_ids.tolist() == calls[2].prompt_ids.tolist()


INSIDE = """
import json, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "From inside"}]}).encode()
url = "http://127.0.0.1:8080/v1/chat/completions"
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


async def test_a_namespace_without_network_reaches_its_own_endpoint(proxy):
    """`unshare` makes a network namespace with nothing in it; the endpoint appears there, and only for its rollout."""
    await proxy.open.remote(opened("inside"))
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    process = subprocess.Popen(
        ["unshare", *user, "--net", sys.executable, "-c",
         "import subprocess, sys\nsubprocess.run(['ip', 'link', 'set', 'lo', 'up'])\nprint('up', flush=True)\n"
         f"sys.stdin.readline()\nexec({json.dumps(INSIDE)})"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )
    assert await asyncio.to_thread(process.stdout.readline) == "up\n"
    await proxy.listen.remote("inside", process.pid, 8080)
    out, _ = await asyncio.to_thread(process.communicate, "go\n", 60)
    assert out == "The same words.\n"
    (call,) = await proxy.finish.remote("inside")
    assert "From inside" in call.messages
