"""What is archived is read back bit for bit."""

import numpy as np
import pyarrow.parquet as pq
from hypothesis import given, settings

from lightning_ray.trajectory.archive import read_rollouts, write_rollouts
from tests.unit.trajectories import groups, make_call, make_trajectory


@settings(max_examples=25, deadline=None)
@given(groups())
def test_law9_a_round_trip_changes_nothing(tmp_path_factory, made):
    path = tmp_path_factory.mktemp("archive") / "step.parquet"
    flat = [trajectory for group in made for trajectory in group]
    write_rollouts(path, flat, max_tokens=16)
    back = read_rollouts(path)
    assert [t.rollout_id for t in back] == [t.rollout_id for t in flat]
    for one, other in zip(flat, back, strict=True):
        assert (one.reward, one.end, one.discarded_tokens) == (other.reward, other.end, other.discarded_tokens)
        assert len(one.calls) == len(other.calls)
        for call, again in zip(one.calls, other.calls, strict=True):
            for name in ("prompt_ids", "sampled_ids", "logprobs", "versions"):
                array, array_again = getattr(call, name), getattr(again, name)
                assert array.dtype == array_again.dtype and array.tobytes() == array_again.tobytes()
            assert call.masked == again.masked


def test_the_mask_says_what_was_trained(tmp_path):
    path = tmp_path / "step.parquet"
    kept = make_trajectory([make_call(0, [1, 1], [2, 3])], rollout_id="kept")
    silent = make_trajectory([make_call(0, [1], [2])], rollout_id="silent")
    write_rollouts(path, [kept, silent], max_tokens=3, dropped={"silent": "zero_variance"})
    rows = pq.read_table(path).to_pylist()
    assert [(row["loss_mask"], row["dropped"]) for row in rows] == [([True, False], None), ([False], "zero_variance")]


def test_what_is_left_out_shows_in_the_mask_and_the_record_stays_as_it_was(tmp_path):
    path = tmp_path / "step.parquet"
    both = [make_call(0, [1], [2], system="You fix bugs."), make_call(1, [3], [4], system="Give it a title.")]
    write_rollouts(path, [make_trajectory(both)], max_tokens=8, train="bugs")
    assert [row["loss_mask"] for row in pq.read_table(path).to_pylist()] == [[True], [False]]
    assert [call.masked for call in read_rollouts(path)[0].calls] == [None, None]


def test_a_rollout_without_calls_is_kept(tmp_path):
    path = tmp_path / "step.parquet"
    write_rollouts(path, [make_trajectory([], end="harness_failed")], max_tokens=8)
    (back,) = read_rollouts(path)
    assert back.end == "harness_failed" and back.calls == [] and np.isclose(back.reward, 0.0)
