"""harness/frames.py: messages between runner and worker arrive whole, whatever is in them and however they are cut."""

import asyncio
import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.harness import frames

LEAVES = st.none() | st.booleans() | st.integers(-2**53, 2**53) | st.text(max_size=50)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3))
MESSAGES = st.lists(st.dictionaries(st.text(max_size=8), VALUES, max_size=4), max_size=4)


@given(MESSAGES, st.integers(1, 64))
def test_messages_arrive_as_they_were_sent_however_they_are_cut(messages, size):
    data = b"".join(frames.encode(message) for message in messages)

    async def receive_all():
        reader = asyncio.StreamReader()
        for start in range(0, len(data), size):
            reader.feed_data(data[start:start + size])
        reader.feed_eof()
        received = []
        while (message := await frames.receive_async(reader)) is not None:
            received.append(message)
        return received

    assert asyncio.run(receive_all()) == messages


def test_blocking_side_reads_large_messages_and_the_end():
    ours, theirs = socket.socketpair()
    message = {"output": "x" * 3_000_000}

    def write():
        with theirs:
            theirs.sendall(frames.encode(message))

    thread = threading.Thread(target=write)
    thread.start()
    with ours, ours.makefile("rb") as stream:
        assert frames.receive(stream) == message
        assert frames.receive(stream) is None
    thread.join()


def test_lone_surrogates_do_not_break_the_connection():
    assert frames.decode(frames.encode({"command": "echo \ud800"})[4:]) == {"command": "echo ?"}


@pytest.mark.parametrize("body", [b"no json", b"[1]", b"\xff"])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(frames.FrameError):
        frames.decode(body)


def test_a_length_over_the_limit_is_refused_before_anything_is_read():
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as stream:
        theirs.sendall(struct.pack(">I", frames.MAX_FRAME + 1))
        with pytest.raises(frames.FrameError, match="longer than"):
            frames.receive(stream)
