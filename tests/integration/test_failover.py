"""A harness before generators that are put to sleep for each update, and killed: it sees a slow model, no more."""

import asyncio
import os
import signal
import time
from contextlib import suppress

import numpy as np
import openai
import psutil
import pytest
import ray

from lightning_ray.config import ProxyConfig, SamplingConfig
from lightning_ray.proxy.codec import Codec
from lightning_ray.proxy.endpoint import OpenRollout
from lightning_ray.proxy.engine import Engine, RayGenerator
from lightning_ray.proxy.rollouts import ProxyServer
from tests.integration.conftest import TEMPERATURE
from tests.integration.test_policy_group import sampled

pytestmark = pytest.mark.timeout(300)
TOKENS = 700


class Watched(RayGenerator):
    """Keeps what each call to the generator came back with."""

    def __init__(self, handle) -> None:
        super().__init__(handle)
        self.pieces = []

    async def generate(self, request):
        piece = await super().generate(request)
        self.pieces.append(piece)
        return piece


@pytest.fixture
async def watched(policy_group, policy_config, tiny_model_dir):
    """A generator, a client of a proxy before it, and `finish`, which gives the recorded calls."""
    generator = Watched(policy_group.generators[0])
    server = ProxyServer(Codec(tiny_model_dir, policy_config.policy), Engine([generator]), ProxyConfig(), "policy")
    await server.start()
    endpoint = server.open(OpenRollout("r", mode="evaluate", seed=1, max_calls=200,
                                       sampling=SamplingConfig(temperature=TEMPERATURE, max_tokens=TOKENS)))
    client = openai.AsyncOpenAI(base_url=endpoint.base_url + "/v1", api_key="x", max_retries=0, timeout=240)
    yield generator, client, lambda: server.finish("r")
    await client.close()
    await server.stop()


def ask(client, number: int, *, stream: bool):
    return client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": f"Task {number}"}], temperature=TEMPERATURE,
        extra_body={"ignore_eos": True}, stream=stream, stream_options={"include_usage": True} if stream else None)


async def two_requests(client) -> list[int]:
    """How many tokens the harness was told that it got: one request whole, one streamed."""
    whole, stream = await asyncio.gather(ask(client, 0, stream=False), ask(client, 1, stream=True))
    return [whole.usage.completion_tokens, *[chunk.usage.completion_tokens async for chunk in stream if chunk.usage]]


async def in_the_middle(generator) -> None:
    """Both of `two_requests` have tokens, and not all of them yet."""
    health = {"in_flight": 0}
    while health["in_flight"] < 2 or health["waiting"]:
        health = await generator.handle.health.remote()


async def looked_after(group, requests: asyncio.Task) -> list[int]:
    """What a trainer does while rollouts run."""
    while not requests.done():
        await asyncio.to_thread(group.check)
        await asyncio.sleep(0.2)
    return await requests


async def pid_of(generator) -> int:
    return (await generator.handle.ready.remote())["pid"]


async def engine_of(generator) -> tuple[int, psutil.Process]:
    """The generator's process id, and the process of its engine."""
    below: list[psutil.Process] = []
    for _ in range(60):
        pid = await pid_of(generator)
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(pid).children(recursive=True)
            engines = [process for process in below if "EngineCore" in " ".join(process.cmdline())]
            if len(engines) == 1:
                return pid, engines[0]
        await asyncio.sleep(0.5)
    raise AssertionError(f"generator {pid} has no engine below it, but {below}")


async def test_law4_a_harness_runs_through_twenty_updates_for_which_its_generations_are_sent_again(
        by_turns, request_for, watched, tmp_path):
    policy_group, (_, client, finish) = by_turns, watched
    before, told = policy_group.version, []
    samples = await asyncio.to_thread(sampled, policy_group, request_for)

    async def update() -> None:
        for _ in range(19):
            await asyncio.to_thread(policy_group.update, samples)
        await asyncio.to_thread(policy_group.save, tmp_path)  # the generator has to make room for that too
        fresh = await asyncio.to_thread(sampled, policy_group, request_for)
        metrics = await asyncio.to_thread(policy_group.update, fresh)
        assert metrics["logprob_gap_mean"] < 0.02 and metrics["weights_verified"] == 1.0

    updates = asyncio.ensure_future(update())
    while not updates.done():
        told += await two_requests(client)  # the client does not retry: an error would be raised here
    await updates

    calls = await finish()
    assert told == [TOKENS] * len(calls) and policy_group.version == before + 20
    seen = set()
    for call in calls:
        assert len(call.sampled_ids) == len(call.logprobs) == TOKENS and call.masked is None
        assert np.all(np.diff(call.versions) >= 0) and np.isfinite(call.logprobs).all()
        seen |= set(call.versions.tolist())
    assert seen <= set(range(before, before + 21)) and len(seen) > 10, sorted(seen)
    assert max(len(set(call.versions)) for call in calls) > 1


async def test_law8_the_engine_dies_and_generations_go_on_from_their_tokens_over_an_update(
        policy_group, request_for, watched):
    generator, client, finish = watched
    samples = await asyncio.to_thread(sampled, policy_group, request_for)
    (pid, engine), before = await engine_of(generator), policy_group.version
    requests = asyncio.ensure_future(two_requests(client))
    await in_the_middle(generator)
    engine.kill()
    while len(generator.pieces) < 2:
        await asyncio.sleep(0.05)
    metrics = await asyncio.to_thread(policy_group.update, samples)
    assert metrics["generators_away"] == 1 and metrics["weights_verified"] == 0.0
    assert await looked_after(policy_group, requests) == [TOKENS, TOKENS]
    assert await pid_of(generator) != pid

    pieces = [piece for piece in generator.pieces if piece.finish_reason == "interrupted"]
    cut = {tuple(piece.token_ids): piece for piece in pieces if len(piece.token_ids)}
    assert len(cut) == 2, "tokens that were known were lost"
    for call in await finish():
        (first,) = (piece for ids, piece in cut.items() if ids == tuple(call.sampled_ids[:len(ids)]))
        kept = len(first.token_ids)
        assert call.logprobs[:kept].tolist() == first.logprobs.tolist()
        assert call.versions.tolist() == [before] * kept + [before + 1] * (TOKENS - kept)
        assert len(call.sampled_ids) == len(call.logprobs) == TOKENS and call.masked is None


async def test_law8_the_actor_is_killed_and_generations_are_done_again_with_the_current_weights(
        policy_group, request_for, watched):
    generator, client, finish = watched
    samples = await asyncio.to_thread(sampled, policy_group, request_for)
    await asyncio.to_thread(policy_group.update, samples)  # else the weights that the actor was started with would do
    pid, version = await pid_of(generator), policy_group.version
    children = psutil.Process(pid).children(recursive=True)
    requests = asyncio.ensure_future(two_requests(client))
    await in_the_middle(generator)
    os.kill(pid, signal.SIGKILL)
    assert await looked_after(policy_group, requests) == [TOKENS, TOKENS]

    assert not any(child.is_running() for child in children), "an engine outlives its actor"
    calls = await finish()
    assert [len(call.sampled_ids) for call in calls] == [TOKENS, TOKENS]  # law 1: counted once
    assert sum(len(piece.token_ids) for piece in generator.pieces) == 2 * TOKENS
    assert all(set(call.versions) == {version} for call in calls)
    fresh = await asyncio.to_thread(sampled, policy_group, request_for)
    metrics = await asyncio.to_thread(policy_group.update, fresh)
    assert metrics["logprob_gap_mean"] < 0.02, "the new process samples with other weights than the learner has"
    assert metrics["weights_verified"] == 1.0 and metrics["generators_away"] == 0
    answer = ray.get(generator.handle.generate.remote(request_for([5, 6, 7], 20)))
    assert set(answer.versions) == {policy_group.version} and np.isfinite(answer.logprobs).all()


def test_law8_a_generator_that_dies_while_the_learner_works_misses_that_publish_only(
        policy_group, request_for, monkeypatch):
    generator, learners_do = policy_group.generators[0], policy_group._learners_do

    def and_the_generator_dies(method, *arguments):
        if method == "step":
            os.kill(ray.get(generator.ready.remote())["pid"], signal.SIGKILL)
            while not answers(generator):  # the new process is there, and its engine is not
                time.sleep(0.05)
        return learners_do(method, *arguments)

    monkeypatch.setattr(policy_group, "_learners_do", and_the_generator_dies)
    metrics = policy_group.update(sampled(policy_group, request_for))
    assert metrics["generators_away"] == 1 and metrics["weights_verified"] == 0.0
    monkeypatch.undo()
    while not policy_group.check():
        time.sleep(0.2)
    answer = ray.get(generator.generate.remote(request_for([5, 6, 7], 20)))
    assert set(answer.versions) == {policy_group.version}


def answers(generator) -> bool:
    try:
        return ray.get(generator.parcel.remote()) == []
    except ray.exceptions.RayActorError:
        return False
