"""Which generator takes a call, and what becomes of calls whose generator dies under them."""

import asyncio

import numpy as np
import pytest

from lightning_ray.generator.request import GenerateRequest, Generation
from lightning_ray.proxy import engine as module
from lightning_ray.proxy.engine import SLACK, Engine, GeneratorDied


class Counting:
    """Samples the numbers after the prompt's last; `dies_after` so many its engine, or all of it, is gone."""

    def __init__(self, version: int = 0, dies_after: int | None = None, wholly: bool = False):
        self.version, self.dies_after, self.wholly = version, dies_after, wholly
        self.requests: list[GenerateRequest] = []
        self.held: asyncio.Event | None = None
        self.aborted = False

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        if self.held:
            await self.held.wait()
        if self.dies_after is not None and self.wholly:
            raise GeneratorDied("killed")
        finish = "length" if self.dies_after is None else "interrupted"
        size = request.max_tokens if self.dies_after is None else self.dies_after
        if self.aborted:
            size, finish = 1, "abort"
        ids = request.prompt_ids[-1] + 1 + np.arange(size, dtype=np.int32)
        return Generation(ids, ids / 10, np.full(size, self.version, np.int32), finish)

    async def abort(self, request_id: str) -> None:
        self.aborted = True
        self.held.set()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.001)


def request(max_tokens: int = 10, **fields) -> GenerateRequest:
    return GenerateRequest("r/0", [1, 2, 3], max_tokens, 1.0, **fields)


async def test_a_generation_moves_to_another_generator_with_the_tokens_that_it_has():
    first, second = Counting(version=4, dies_after=6), Counting(version=5)
    answer = await Engine([first, second]).generate("r", request())
    assert answer.token_ids.tolist() == list(range(4, 14)) and answer.finish_reason == "length"
    assert answer.versions.tolist() == [4] * 6 + [5] * 4
    assert answer.logprobs.tolist() == (np.arange(4, 14, dtype=np.int32) / 10).astype(np.float32).tolist()
    assert second.requests[0].prompt_ids == [1, 2, 3, *range(4, 10)] and second.requests[0].max_tokens == 4


async def test_a_generation_whose_tokens_are_unknown_is_done_again():
    first, second = Counting(dies_after=6, wholly=True), Counting(version=5)
    answer = await Engine([first, second]).generate("r", request())
    assert answer.versions.tolist() == [5] * 10 and second.requests[0] == request()


async def test_the_only_generator_is_asked_until_it_is_back():
    only = Counting(dies_after=3)
    engine = Engine([only])
    waiting = asyncio.ensure_future(engine.generate("r", request()))
    while len(only.requests) < 3:
        await asyncio.sleep(0.001)
    only.dies_after, only.version = None, 1
    answer = await waiting
    assert answer.token_ids.tolist() == list(range(4, 14))
    assert [seat.load for seat in engine.seats] == [0]


async def test_all_tokens_known_needs_no_generator_any_more():
    only = Counting(dies_after=10)
    answer = await Engine([only]).generate("r", request())
    assert len(answer.token_ids) == 10 and answer.finish_reason == "length" and len(only.requests) == 1


async def test_an_abort_ends_a_generation_with_all_its_pieces():
    first, second = Counting(dies_after=4), Counting()
    second.held = asyncio.Event()
    engine = Engine([first, second])
    waiting = asyncio.ensure_future(engine.generate("r", request()))
    while not second.requests:
        await asyncio.sleep(0.001)
    await engine.abort("r/0")
    answer = await waiting
    assert answer.finish_reason == "abort" and answer.token_ids.tolist() == [4, 5, 6, 7, 8]


async def test_an_abort_while_no_generator_is_there_ends_it_with_what_it_has():
    only = Counting(dies_after=2)
    engine = Engine([only])
    waiting = asyncio.ensure_future(engine.generate("r", request()))
    while not only.requests:
        await asyncio.sleep(0.001)
    only.wholly = True
    while engine.running:
        await asyncio.sleep(0)
    await engine.abort("r/0")
    answer = await waiting
    assert answer.finish_reason == "abort" and answer.token_ids.tolist()[:2] == [4, 5]


async def test_one_that_just_died_gets_no_call_that_another_can_take():
    dead, alive = Counting(dies_after=0, wholly=True), Counting()
    engine = Engine([dead, alive])
    for number in range(SLACK + 2):
        await engine.generate(f"r{number}", request())
    assert len(dead.requests) == 1


def test_a_rollout_stays_where_its_prefix_is_until_that_is_far_busier():
    engine = Engine([Counting(), Counting()])
    home = engine.choose("r", 0.0)
    home.load = SLACK
    assert engine.choose("r", 0.0) is home
    home.load = SLACK + 1
    assert engine.choose("r", 0.0) is not home
