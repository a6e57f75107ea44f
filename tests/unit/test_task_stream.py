import math
from collections import Counter

import pytest

from lightning_ray.tasks.base import Task
from lightning_ray.tasks.stream import TaskStream

TASKS = [Task(instance_id=f"t{number}", problem_statement="x") for number in range(5)]


def ids(stream, count):
    return [stream.next().instance_id for _ in range(count)]


def test_each_pass_holds_every_task_once_in_an_order_of_its_own():
    stream = TaskStream(TASKS, seed=3)
    first, second = ids(stream, 5), ids(stream, 5)
    assert sorted(first) == sorted(second) == [task.instance_id for task in TASKS]
    assert first != second


def test_a_stream_goes_on_where_it_stopped():
    whole = ids(TaskStream(TASKS, seed=3), 12)
    assert ids(TaskStream(TASKS, seed=3, cursor=7), 5) == whole[7:]
    assert whole != ids(TaskStream(TASKS, seed=4), 12)


def test_requeued_tasks_go_first_and_do_not_move_the_cursor():
    stream = TaskStream(TASKS, seed=3)
    before = ids(stream, 1)
    stream.requeue(before[0])
    assert stream.requeued == before
    assert ids(stream, 1) == before and stream.cursor == 1


def test_what_is_set_aside_is_not_handed_out_again():
    stream = TaskStream(TASKS, seed=3)
    stream.requeue("t2")
    stream.put_aside("t2")
    stream.requeue("t2")
    assert "t2" not in ids(stream, 12) and stream.set_aside == ["t2"]
    again = TaskStream(TASKS, seed=3, cursor=stream.cursor, set_aside=stream.set_aside)
    assert ids(again, 8) == ids(stream, 8)


def test_a_stream_that_has_nothing_left_says_so():
    stream = TaskStream(TASKS, seed=3, set_aside=["t0", "t1", "t2", "t3"])
    assert set(ids(stream, 3)) == {"t4"} and not stream.exhausted
    stream.put_aside("t4")
    assert stream.exhausted
    with pytest.raises(ValueError, match="every task is set aside"):
        stream.next()


def weighted(weights):
    return [Task(instance_id=f"t{number}", problem_statement="x", weight=each) for number, each in enumerate(weights)]


def test_tasks_are_handed_out_as_often_as_their_weights_say():
    weights = [0, 0.25, 0.5, 1, 1, 2.25]
    tasks = weighted(weights)
    stream = TaskStream(tasks, seed=3)
    for _ in range(20):  # in every single pass, up to rounding
        counts = Counter(ids(stream, len(tasks)))
        for number, weight in enumerate(weights):
            share = weight / sum(weights) * len(tasks)
            assert math.floor(share) <= counts[f"t{number}"] <= math.ceil(share)
    counts = Counter(ids(TaskStream(tasks, seed=3), 6 * 500))
    assert counts["t1"] / counts["t5"] == pytest.approx(0.25 / 2.25, rel=0.15) and "t0" not in counts


def test_a_weighted_stream_is_decided_by_its_seed_and_goes_on_where_it_stopped():
    tasks = weighted([1, 2, 0.5, 3])
    whole = ids(TaskStream(tasks, seed=3), 40)
    assert ids(TaskStream(tasks, seed=3, cursor=17), 23) == whole[17:]
    assert whole != ids(TaskStream(tasks, seed=4), 40)


@pytest.mark.parametrize("weight", [0.1, 1, 7])
def test_equal_weights_are_no_weights(weight):
    assert ids(TaskStream(weighted([weight] * 5), seed=3), 15) == ids(TaskStream(TASKS, seed=3), 15)


def test_a_stream_whose_weighted_tasks_are_set_aside_has_nothing_to_give():
    stream = TaskStream(weighted([0, 1, 1]), seed=3, set_aside=["t1"])
    assert set(ids(stream, 10)) == {"t2"}
    stream.put_aside("t2")
    assert stream.exhausted
    with pytest.raises(ValueError, match="no task"):
        TaskStream(weighted([0, 0]), seed=3)
