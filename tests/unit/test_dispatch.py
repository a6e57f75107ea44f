"""Dispatch: turns, limits, and runners that are down."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lightning_ray.dispatch import Dispatch
from lightning_ray.harness.spec import RolloutSpec
from lightning_ray.tasks.base import Task

TASK = Task(instance_id="t", problem_statement="x")


def submit(dispatch, *names):
    for name in names:
        dispatch.submit(RolloutSpec(rollout_id=str(name), group_id="g", task=TASK, mode="train", seed=0,
                                    temperature=1.0))


def started(dispatch):
    starts = []
    while (start := dispatch.next()) is not None:
        starts.append(start)
    return starts


def names(starts):
    return [(start.spec.rollout_id, start.runner) for start in starts]


def test_without_a_limit_all_start_at_once_spread_over_the_runners():
    dispatch = Dispatch(2)
    submit(dispatch, *range(5))
    assert names(started(dispatch)) == [("0", 0), ("1", 1), ("2", 0), ("3", 1), ("4", 0)]
    assert dispatch.running == 5 and dispatch.waiting == 0


def test_beyond_the_limit_rollouts_wait_their_turn():
    dispatch = Dispatch(1)
    dispatch.limit = 2
    submit(dispatch, *range(4))
    first = started(dispatch)
    assert len(first) == 2 and dispatch.waiting == 2
    dispatch.ended(first[1])
    assert names(started(dispatch)) == [("2", 0)]


def test_a_higher_limit_starts_more_and_a_lower_one_stops_nothing():
    dispatch = Dispatch(1)
    dispatch.limit = 1
    submit(dispatch, *range(4))
    started(dispatch)
    dispatch.limit = 3
    assert len(started(dispatch)) == 2
    dispatch.limit = 1
    assert dispatch.running == 3 and started(dispatch) == []


def test_what_a_dead_runner_lost_starts_first_on_the_others():
    dispatch = Dispatch(2)
    dispatch.limit = 2
    submit(dispatch, "a", "b", "c")
    of_a, _ = started(dispatch)
    assert dispatch.down(of_a.runner) and not dispatch.down(of_a.runner)
    dispatch.lost(of_a)
    (again,) = started(dispatch)
    assert (again.spec.rollout_id, again.runner, again.spec.lost) == ("a", 1, 1) and dispatch.loads == [0, 2]


def test_nothing_starts_while_all_runners_are_down_and_nothing_is_lost():
    dispatch = Dispatch(2)
    dispatch.down(0), dispatch.down(1)
    submit(dispatch, "a")
    assert started(dispatch) == [] and dispatch.waiting == 1
    dispatch.up(1)
    assert names(started(dispatch)) == [("a", 1)]


class DispatchMachine(RuleBasedStateMachine):
    """Any order of submissions, ends, losses and limits: every rollout runs, waits or ended, and bounds hold."""

    def __init__(self):
        super().__init__()
        self.dispatch, self.count, self.open, self.over, self.down = Dispatch(3), 0, [], 0, set()

    @rule()
    def submit_some(self):
        submit(self.dispatch, self.count, self.count + 1)
        self.count += 2

    @rule(limit=st.integers(1, 5))
    def start_all(self, limit):
        self.dispatch.limit = limit
        before = self.dispatch.running
        self.open += (new := started(self.dispatch))
        assert not {start.runner for start in new} & self.down
        assert self.dispatch.running <= max(limit, before)
        if self.dispatch.waiting and len(self.down) < 3:
            assert self.dispatch.running >= limit, "a rollout waits although there is room"

    @rule(data=st.data())
    def end_one(self, data):
        if self.open:
            self.dispatch.ended(self.open.pop(data.draw(st.integers(0, len(self.open) - 1))))
            self.over += 1

    @rule(runner=st.integers(0, 2))
    def kill(self, runner):
        self.dispatch.down(runner)
        self.down.add(runner)
        for start in [each for each in self.open if each.runner == runner]:
            self.open.remove(start)
            self.dispatch.lost(start)

    @rule(runner=st.integers(0, 2))
    def bring_back(self, runner):
        self.dispatch.up(runner)
        self.down.discard(runner)

    @invariant()
    def nothing_is_lost(self):
        assert self.dispatch.running == len(self.open)
        assert self.count == len(self.open) + self.over + self.dispatch.waiting


TestDispatch = DispatchMachine.TestCase
TestDispatch.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
