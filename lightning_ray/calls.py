"""Calls on several actors at once, whose failures say which part they came from."""

import ray
from ray.exceptions import RayActorError


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
