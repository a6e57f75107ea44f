"""Generations that ended lately, for callers that died before they got them (law 1). Plain data, pure.

A proxy whose process dies loses what generators were sampling for it. The next process asks each generator for it by
request id. How long ago is enough depends on how long a proxy takes to come back; how much memory that costs, on how
fast the engine is: 12 bytes a token.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

from lightning_ray.generator.request import Generation

KEPT_S = 180.0
"""A proxy is back within half a minute, on an overloaded machine within two."""


class Ended:
    """What ended in the last `KEPT_S` seconds and was not claimed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, Generation]] = OrderedDict()

    def keep(self, request_id: str, generation: Generation) -> Generation:
        """Remember it, and return it."""
        now = self._clock()
        self._kept[request_id] = (now, generation)
        self._kept.move_to_end(request_id)
        while next(iter(self._kept.values()))[0] < now - KEPT_S:
            self._kept.popitem(last=False)
        return generation

    def take(self, request_id: str) -> Generation | None:
        """It, once; None where there is none."""
        _, generation = self._kept.pop(request_id, (0.0, None))
        return generation
