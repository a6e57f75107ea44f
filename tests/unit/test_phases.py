"""The phases of the policy group: every order that is allowed, and no other."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from lightning_ray.phases import ORDER, Phases, WrongOrder

STEPS = sorted({step for _, step in ORDER})


def take(phases: Phases, *steps: str, version: int | None = None) -> None:
    for step in steps:
        with phases.step(step, version if step == "publish" else None):
            pass


def test_an_update_goes_once_around():
    phases = Phases()
    take(phases, "freeze", "learn", "publish", "verify", "thaw", version=1)
    assert (phases.phase, phases.version) == ("generating", 1)


def test_a_checkpoint_is_published_without_learning():
    phases = Phases()
    take(phases, "freeze", "publish", "verify", "thaw", version=17)
    assert phases.version == 17


@pytest.mark.parametrize(("steps", "wrong"), [
    ((), "learn"), ((), "publish"), ((), "thaw"), (("freeze",), "freeze"), (("freeze", "learn"), "thaw"),
    (("freeze", "learn"), "learn"), (("freeze", "learn", "publish"), "thaw"), (("freeze", "publish"), "learn"),
])
def test_wrong_orders_are_refused_and_change_nothing(steps, wrong):
    phases = Phases()
    take(phases, *steps, version=1)
    before = phases.phase
    with pytest.raises(WrongOrder, match=f"{wrong} is not allowed while {before}"):
        take(phases, wrong, version=1)
    assert (phases.phase, phases.version) == (before, 0)


def test_the_version_counts_only_when_it_is_verified():
    phases = Phases()
    take(phases, "freeze", "learn", "publish", version=1)
    assert phases.version == 0
    take(phases, "verify")
    assert phases.version == 1


def test_after_learning_the_next_version_is_the_only_one():
    phases = Phases(version=4)
    take(phases, "freeze", "learn")
    for version in (4, 6, None):
        with pytest.raises(WrongOrder, match="version"):
            take(phases, "publish", version=version)
    take(phases, "publish", version=5)


def test_a_step_that_fails_leaves_the_machine_where_it_was():
    phases = Phases()
    take(phases, "freeze")
    with pytest.raises(ZeroDivisionError), phases.step("learn"):
        1 / 0  # noqa: B018
    assert phases.phase == "frozen"
    take(phases, "thaw")


class AnyOrder(RuleBasedStateMachine):
    """Random steps: generators never run on weights that were learned or published but not verified."""

    def __init__(self):
        super().__init__()
        self.phases, self.pending = Phases(), False

    @rule(step=st.sampled_from(STEPS), fails=st.booleans())
    def do(self, step, fails):
        before = (self.phases.phase, self.phases.version)
        try:
            with self.phases.step(step, self.phases.version + 1 if step == "publish" else None):
                if fails:
                    raise OSError
        except (WrongOrder, OSError):
            assert (self.phases.phase, self.phases.version) == before
            return
        if step in ("learn", "publish"):
            self.pending = True
        elif step == "verify":
            self.pending = False
        assert not (self.phases.phase == "generating" and self.pending)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
