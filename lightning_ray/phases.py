"""In which order learner and generator share their machines. One small state machine, pure.

    generating --freeze--> frozen --learn--> learned --publish--> published --verify--> verified --thaw--> generating
                             |                          ^
                             +--publish (other weights) +         frozen --thaw--> generating (nothing was learned)

Where learner and generators have the memory of their devices by turns, the generators give theirs up at the end of
`freeze`, and the learner its own at the beginning of `thaw`: in between the learner's states are on the device.

A step that is not allowed where the machine stands raises `WrongOrder`. A step that fails leaves the machine where it
was: weights that were learned but not published, or published but not verified, can never be thawed.
"""

from collections.abc import Iterator
from contextlib import contextmanager

ORDER = {
    ("generating", "freeze"): "frozen",
    ("frozen", "learn"): "learned",
    ("frozen", "publish"): "published",
    ("frozen", "thaw"): "generating",
    ("learned", "publish"): "published",
    ("published", "publish"): "published",
    ("published", "verify"): "verified",
    ("verified", "thaw"): "generating",
}


class WrongOrder(RuntimeError):
    """A step was asked for where it is not allowed."""


class Phases:
    """Where the group stands, and the policy version that its generators sample with."""

    def __init__(self, version: int = 0):
        self.phase = "generating"
        self.version = version
        self._published: int | None = None

    @contextmanager
    def step(self, name: str, version: int | None = None) -> Iterator[None]:
        """Do one step inside `with`: refused at once where it is not allowed, taken when the block ends well.

        `publish` names the version that it publishes: the next one after `learn`, any from 0 on for other weights.
        `verify` makes it the group's version.
        """
        target = ORDER.get((self.phase, name))
        if target is None:
            allowed = [step for phase, step in ORDER if phase == self.phase]
            raise WrongOrder(f"{name} is not allowed while {self.phase}; allowed: {', '.join(allowed)}")
        if name == "publish":
            self._check_version(version)
        yield
        if name == "publish":
            self._published = version
        elif name == "verify":
            self.version = self._published
        self.phase = target

    def _check_version(self, version: int | None) -> None:
        if version is None or version < 0:
            raise WrongOrder(f"publish needs a policy version from 0 on, not {version}")
        if self.phase == "learned" and version != self.version + 1:
            raise WrongOrder(f"after learning, policy version {self.version + 1} comes next, not {version}")
