"""Calls on several actors at once, whose failures say which part they came from, and their end."""

import logging
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

log = logging.getLogger(__name__)


class PartDied(RuntimeError):
    """A learner rank or a generator is gone for good. The message names it."""


def gather(calls: dict[str, ray.ObjectRef], survive: tuple[type[Exception], ...] = ()) -> list:
    """The results in order; exceptions of the kinds in `survive` stand in for theirs.

    The first other call that fails ends the wait, since the rest may be waiting for that part: an actor that died
    raises `PartDied` with its name, and what a part raised comes through with a note that names the part.
    """
    names = {ref: name for name, ref in calls.items()}
    results: dict[ray.ObjectRef, object] = {}
    waiting = list(names)
    while waiting:
        (ref,), waiting = ray.wait(waiting, num_returns=1)
        try:
            results[ref] = ray.get(ref)
        except survive as error:
            results[ref] = error
        except RayActorError as error:
            raise PartDied(f"{names[ref]} died: {error}") from error
        except Exception as error:
            error.add_note(f"raised by {names[ref]}")
            raise
    return [results[ref] for ref in names]


def end(parts: Sequence[ActorHandle], timeout_s: float) -> None:
    """Has actors stop, all at once, waits at most so long, and ends their processes."""
    stopping = {part.stop.remote(): part for part in parts}
    if stopping:
        _, late = ray.wait(list(stopping), num_returns=len(stopping), timeout=timeout_s)
        for ref in late:
            log.warning("%s did not stop by itself in %g s; its processes end with it", stopping[ref], timeout_s)
    for part in parts:
        ray.kill(part)
