"""What survives the proxy's process: the journal replays to the same session, the keeper's sockets keep listening."""

import asyncio
import os
import pickle
import socket

import numpy as np
import openai
import pytest
from hypothesis import given

from lightning_ray.config import ProxyConfig
from lightning_ray.proxy.engine import Engine
from lightning_ray.proxy.journal import Journal, journals, read
from lightning_ray.proxy.keeper import Keeper, allow_descriptors
from lightning_ray.proxy.rollouts import ProxyServer
from lightning_ray.proxy.session import Session
from lightning_ray.trajectory.branches import parents
from tests.unit.proxy_parts import ScriptedEngine, codec_of, keepers_of, rollout
from tests.unit.test_proxy_exactness import SETTINGS, Rollout, play, programs


def same_calls(one, other, but: tuple[str, ...] = ()) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        for name in set(a.__dataclass_fields__) - set(but):
            left, right = getattr(a, name), getattr(b, name)
            assert np.array_equal(left, right) if isinstance(left, np.ndarray) else left == right, name


@SETTINGS
@given(programs())
def test_law8_a_replayed_session_is_the_same_and_goes_on_the_same(program):
    family, tools, steps = program
    entries = []
    first = Rollout(family, tools)
    first.session.log = lambda *entry: entries.append(pickle.loads(pickle.dumps(entry)))
    play(family, tools, steps, first)
    second = Rollout(family, tools, session=Session(first.session.opened))
    second.session.replay(entries)
    same_calls(first.session.calls(), second.session.calls())
    assert second.session.calls_begun == first.session.calls_begun
    for asked in (first, second):  # both go on from the last call alike
        asked.session.log = lambda *entry: None
        play(family, tools, steps[-1:] * 2, asked)
    same_calls(first.session.calls(), second.session.calls(), but=("messages",))  # ids of tool calls are random


def test_what_was_in_flight_failed_and_counts_no_call():
    entries = []
    session = Session(rollout(max_calls=2), log=lambda *entry: entries.append(entry))
    session.admit(b"a", calls=1, retried=False, now_s=0.0)
    again = Session(rollout(max_calls=2))
    again.replay(entries)
    exchange, new = again.admit(b"a", calls=2, retried=True, now_s=1.0)
    assert new and exchange.ordinal == 1 and exchange.repeat == 1


def test_faults_are_counted_on():
    entries = []
    session = Session(rollout(), log=lambda *entry: entries.append(entry))
    session.fault()
    again = Session(rollout())
    again.replay(entries)
    assert again.faults == session.faults == 1


def test_a_torn_journal_is_good_up_to_the_tear(tmp_path):
    journal = Journal(tmp_path, "group/rollout 1")
    for number in range(3):
        journal.append("entry", number, b"x" * 50)
    journal.close()
    (path,) = journals(tmp_path)
    whole = path.read_bytes()
    for cut in range(len(whole) // 3 * 2, len(whole)):
        path.write_bytes(whole[:cut])
        assert [entry[1] for entry in read(path)] == [0, 1]
        assert path.stat().st_size == len(whole) // 3 * 2
    path.write_bytes(whole[:-1] + b"?")
    assert [entry[1] for entry in read(path)] == [0, 1]
    journal.remove()
    assert not journals(tmp_path)


def test_a_keeper_that_was_told_to_quit_is_not_found_again(tmp_path):
    for _ in range(10):
        keeper = Keeper(tmp_path, watch=os.getpid())
        assert keeper.sockets() == {}
        keeper.quit()


def test_the_keeper_keeps_a_port_open_while_nobody_serves_it(tmp_path):
    deep = tmp_path / ("d" * 100)
    keeper = Keeper(deep, watch=os.getpid())
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    keeper.hold("a:1", listener)
    listener.close()
    keeper._channel.close()  # the proxy died
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(b"hello")
    again = Keeper(deep, watch=os.getpid())
    ((name, kept),) = again.sockets().items()
    kept.setblocking(True)
    connection, _ = kept.accept()
    assert (name, connection.recv(5)) == ("a:1", b"hello")
    again.drop("a:1")
    kept.close()
    connection.close()
    client.close()
    with pytest.raises(OSError):
        for _ in range(200):  # the keeper closes its duplicate soon
            socket.create_connection(("127.0.0.1", port)).close()
    again.quit()


def test_the_keeper_is_found_again_however_many_sockets_it_holds(tmp_path):
    allow_descriptors()
    keeper = Keeper(tmp_path, watch=os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for number in range(1100):
            keeper.hold(f"r{number}:1", listener)

    def how_many() -> int:
        found = keeper.sockets()
        for one in found.values():
            one.close()
        return len(found)

    assert how_many() == 1100
    keeper._channel.close()  # the proxy died
    keeper = Keeper(tmp_path, watch=os.getpid())
    assert how_many() == 1100
    keeper.quit()


async def test_a_taken_port_leaves_no_keeper(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ProxyConfig(port=taken.getsockname()[1])
        codec = codec_of("chatml")
        server = ProxyServer(codec, Engine([ScriptedEngine(codec, str)]), config, "policy", tmp_path)
        with pytest.raises(OSError):
            await server.start()
    for _ in range(100):
        if not keepers_of(tmp_path):
            break
        await asyncio.sleep(0.05)
    assert not keepers_of(tmp_path)


async def die(server: ProxyServer) -> None:
    """What is left of a process when it is killed: its sockets close, it writes no more."""
    for known in server.rollouts.values():
        known.capture.session.log = lambda *entry: None
    await server._site.close()
    server.keeper._channel.close()


async def test_law1_law8_a_proxy_that_comes_back_knows_its_rollouts(tmp_path):
    codec = codec_of("hermes")
    words = iter(["One.", "Two.", "Three."])
    engine = ScriptedEngine(codec, lambda request: next(words))
    sampled, generate = {}, engine.generate

    async def counted(request):
        generation = await generate(request)
        sampled[request.request_id] = generation.token_ids
        return generation

    engine.generate = counted
    config = ProxyConfig()
    first = ProxyServer(codec, Engine([engine]), config, "policy", tmp_path)
    await first.start()
    endpoint = first.open(rollout("a/1"))
    client = openai.AsyncOpenAI(base_url=endpoint.base_url + "/v1", api_key="x", max_retries=3, timeout=20)
    messages = [{"role": "user", "content": "Count."}]
    one = await client.chat.completions.create(model="policy", messages=messages)
    engine.hold = asyncio.Event()
    messages += [{"role": "assistant", "content": one.choices[0].message.content}, {"role": "user", "content": "On."}]
    waiting = asyncio.create_task(client.chat.completions.create(model="policy", messages=messages))
    while len(engine.requests) < 2:
        await asyncio.sleep(0.01)
    await die(first)  # with a call in flight; the SDK's retry meets a port that nobody serves
    await asyncio.sleep(1)
    assert not waiting.done()
    engine.hold = None
    second = ProxyServer(codec, Engine([engine]), config, "policy", tmp_path)
    assert await second.start(restored=True) == first.address
    assert second.open(rollout("a/1")) == endpoint
    assert (await waiting).choices[0].message.content == "Three."
    assert engine.requests[1].request_id in engine.aborted
    assert engine.requests[2].prompt_ids == engine.requests[1].prompt_ids
    calls = await second.finish("a/1")
    lost, retried = calls[1:] if calls[1].masked else calls[:0:-1]
    assert [(call.relation, call.parent, call.masked) for call in (calls[0], lost, retried)] == [
        ("new_conversation", None, None), ("continued", 0, "cancelled"), ("continued", 0, None),
    ]
    assert lost.prompt_ids.tolist() == retried.prompt_ids.tolist() and lost.text == codec.decode(lost.sampled_ids)
    assert sum(len(call.sampled_ids) for call in calls) == sum(map(len, sampled.values()))
    assert len(parents(calls)) == 3
    await die(second)
    third = ProxyServer(codec, Engine([engine]), config, "policy", tmp_path)  # finish is asked again: the same answer
    await third.start(restored=True)
    same_calls(await third.finish("a/1"), calls)
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="policy", messages=messages)
    third.open(rollout("b"))
    assert await third.abandon(["a/1", "a/1.1"]) == sum(map(len, sampled.values())), "as finish, and it is forgotten"
    assert set(third.rollouts) == {"b"} and len(journals(tmp_path)) == 1
    await die(third)
    fourth = ProxyServer(codec, Engine([engine]), config, "policy", tmp_path)  # another run in the same directory
    await fourth.start()
    assert not fourth.rollouts and not journals(tmp_path)
    fourth.open(rollout("b"))
    await fourth.stop()
    await client.close()
    assert not journals(tmp_path)
