"""GroupBuffer: exact refill, oldest first, staleness, and no trajectory lost."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lightning_ray.buffer import GroupBuffer
from tests.unit.trajectories import make_call, make_trajectory


def finish(buffer, rollout_id, *, version=0, end="graded"):
    calls = [] if end == "infra_failed" else [make_call(0, [1], [2], version=version)]
    buffer.finish(make_trajectory(calls, rollout_id=rollout_id, end=end))


def start(buffer, name):
    buffer.start(name, "task", [f"{name}/0", f"{name}/1"])


def test_the_synchronous_schedule_waits_for_all_and_refills_after_the_update():
    buffer = GroupBuffer(groups_per_step=2, groups_in_flight=2, max_staleness=0)
    start(buffer, "a"), start(buffer, "b")
    assert buffer.vacancies == 0 and buffer.take() is None
    for name in ("a/1", "b/0", "b/1"):
        finish(buffer, name)
    assert buffer.take() is None and buffer.vacancies == 0
    finish(buffer, "a/0")
    assert [group.group_id for group in buffer.take()] == ["a", "b"] and buffer.vacancies == 2


def test_carried_over_groups_go_first_oldest_first():
    buffer = GroupBuffer(groups_per_step=1, groups_in_flight=3, max_staleness=9)
    for name in "abc":
        start(buffer, name)
    for name in ("c/0", "c/1", "b/0", "b/1"):
        finish(buffer, name)
    assert [group.group_id for group in buffer.take()] == ["b"]
    start(buffer, "d")
    finish(buffer, "d/0"), finish(buffer, "d/1")
    assert [group.group_id for group in buffer.take()] == ["c"]


def test_members_keep_their_order_whatever_ended_first():
    buffer = GroupBuffer(groups_per_step=1, groups_in_flight=1, max_staleness=0)
    start(buffer, "a")
    finish(buffer, "a/1"), finish(buffer, "a/0")
    assert [member.rollout_id for member in buffer.take()[0].trajectories] == ["a/0", "a/1"]


def test_a_group_with_one_token_too_old_is_dropped_whole():
    buffer = GroupBuffer(groups_per_step=1, groups_in_flight=1, max_staleness=2)
    start(buffer, "a")
    finish(buffer, "a/0", version=5), finish(buffer, "a/1", version=2)
    assert buffer.drop_unusable(version=4) == []
    (drop,) = buffer.drop_unusable(version=5)
    assert drop.reason == "stale" and drop.group.group_id == "a" and buffer.vacancies == 1


def run_group(buffer, name, *, oldest, task="task"):
    buffer.start(name, task, [f"{name}/0", f"{name}/1"])
    finish(buffer, f"{name}/0", version=oldest), finish(buffer, f"{name}/1", version=oldest + 1)


def reasons(buffer, version):
    return [drop.reason for drop in buffer.drop_unusable(version)]


def test_a_task_that_always_takes_too_long_is_set_aside():
    buffer = GroupBuffer(groups_per_step=1, groups_in_flight=1, max_staleness=2, stale_limit=3)
    found = []
    for attempt in range(3):
        run_group(buffer, f"g{attempt}", oldest=10 * attempt)
        found += reasons(buffer, 10 * attempt + 3)
    assert found == ["stale", "stale", "set_aside"] and not buffer.stale_in_a_row


def test_a_task_that_was_fast_enough_once_begins_anew():
    buffer = GroupBuffer(groups_per_step=1, groups_in_flight=2, max_staleness=2, stale_limit=2)
    run_group(buffer, "slow", oldest=0)
    run_group(buffer, "other", oldest=0, task="other")
    assert reasons(buffer, 3) == ["stale", "stale"]
    run_group(buffer, "fast", oldest=3)
    assert reasons(buffer, 3) == [] and buffer.take()
    assert buffer.stale_in_a_row == {"other": 1}
    run_group(buffer, "slow again", oldest=0)
    assert reasons(buffer, 3) == ["stale"]


def test_a_group_that_grew_old_while_it_waited_is_not_its_tasks_fault():
    buffer = GroupBuffer(groups_per_step=2, groups_in_flight=2, max_staleness=2, stale_limit=1)
    run_group(buffer, "waits", oldest=0)
    assert reasons(buffer, 2) == []
    assert reasons(buffer, 3) == ["stale"] and not buffer.stale_in_a_row


def test_how_often_a_task_was_too_slow_is_known_after_a_resume():
    buffer = GroupBuffer(groups_per_step=1, groups_in_flight=1, max_staleness=0, stale_limit=2,
                         stale_in_a_row={"task": 1})
    run_group(buffer, "g", oldest=0)
    assert reasons(buffer, 1) == ["set_aside"]


def test_a_group_with_a_failure_of_ours_is_not_compared():
    buffer = GroupBuffer(groups_per_step=1, groups_in_flight=1, max_staleness=2)
    start(buffer, "a")
    finish(buffer, "a/0"), finish(buffer, "a/1", end="infra_failed")
    assert [drop.reason for drop in buffer.drop_unusable(version=0)] == ["infra_failed"]


def test_groups_that_compare_nothing_are_replaced_up_to_a_bound():
    buffer = GroupBuffer(groups_per_step=2, groups_in_flight=2, max_staleness=2, resample=1)
    for name in "ab":
        start(buffer, name)
        finish(buffer, f"{name}/0"), finish(buffer, f"{name}/1")
    (drop,) = buffer.drop_unusable(version=0)
    assert (drop.reason, drop.group.group_id, buffer.vacancies) == ("resampled", "a", 1)
    start(buffer, "c")
    finish(buffer, "c/0"), finish(buffer, "c/1")
    assert buffer.drop_unusable(version=0) == [], "one a step, else a step might never fill"
    assert [group.group_id for group in buffer.take()] == ["b", "c"]
    start(buffer, "d")
    finish(buffer, "d/0"), finish(buffer, "d/1")
    assert [each.reason for each in buffer.drop_unusable(version=0)] == ["resampled"]


def test_a_rollout_ends_once():
    buffer = GroupBuffer(groups_per_step=1, groups_in_flight=1, max_staleness=0)
    start(buffer, "a")
    finish(buffer, "a/0")
    with pytest.raises(KeyError):
        finish(buffer, "a/0")
    with pytest.raises(ValueError, match="no vacancy"):
        start(buffer, "b")


class BufferMachine(RuleBasedStateMachine):
    """Any order of starts, ends, drops and takes: every rollout comes out exactly once, bounds hold."""

    def __init__(self):
        super().__init__()
        self.buffer = GroupBuffer(groups_per_step=2, groups_in_flight=5, max_staleness=1)
        self.version = self.count = 0
        self.open, self.out, self.started = [], [], []

    @rule()
    def start_all(self):
        for _ in range(self.buffer.vacancies):
            name = f"g{self.count}"
            self.count += 1
            start(self.buffer, name)
            self.started.append(name)
            self.open += [f"{name}/0", f"{name}/1"]

    @rule(data=st.data(), end=st.sampled_from(["graded", "graded", "harness_failed", "infra_failed"]))
    def finish_one(self, data, end):
        if self.open:
            rollout_id = data.draw(st.sampled_from(self.open))
            self.open.remove(rollout_id)
            finish(self.buffer, rollout_id, version=self.version, end=end)

    @rule()
    def update(self):
        for drop in self.buffer.drop_unusable(self.version):
            self.out.append(drop.group)
        complete = [group.group_id for group in self.buffer.complete]
        taken = self.buffer.take()
        assert (taken is None) == (len(complete) < 2)
        if taken:
            assert [group.group_id for group in taken] == complete[:2]
            for group in taken:
                oldest = group.oldest_version
                assert not group.broken and (oldest is None or self.version - oldest <= 1)
            self.out += taken
            self.version += 1

    @invariant()
    def nothing_is_lost(self):
        assert 0 <= self.buffer.vacancies <= 5
        left = [group.group_id for group in self.out]
        assert len(left) == len(set(left))
        assert len(self.started) - len(left) == 5 - self.buffer.vacancies


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
