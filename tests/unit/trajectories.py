"""Trajectories for tests, and hypothesis strategies that make arbitrary ones."""

import numpy as np
from hypothesis import strategies as st

from lightning_ray.trajectory.call import Call, Trajectory

MASKS = (None, None, None, "constrained", "cancelled")
SYSTEMS = ("You fix bugs.", "You fix bugs.", "Give it a title.", "")


def make_call(index, prompt, sampled, *, version=0, masked=None, system=""):
    return Call(
        index=index, prompt_ids=np.array(prompt, np.int32), sampled_ids=np.array(sampled, np.int32),
        logprobs=-np.arange(1, len(sampled) + 1, dtype=np.float32), versions=np.full(len(sampled), version, np.int32),
        finish_reason="stop", masked=masked, system=system)


def make_trajectory(calls, *, reward=0.0, rollout_id="r0", group_id="g0", end="graded", discarded=0):
    return Trajectory(rollout_id=rollout_id, group_id=group_id, task_id="t", calls=list(calls), end=end,
                      reward=reward, passed=reward > 0, discarded_tokens=discarded)


@st.composite
def call_lists(draw, max_calls=8):
    """Calls that continue earlier ones, fork, repeat or start afresh, over a small alphabet so that prompts collide."""
    tokens = st.lists(st.integers(0, 2), min_size=0, max_size=4)
    calls = []
    for index in range(draw(st.integers(0, max_calls))):
        base = []
        if calls and draw(st.booleans()):
            earlier = draw(st.sampled_from(calls))
            base = [*earlier.prompt_ids, *earlier.sampled_ids]
        prompt = [*base, *draw(tokens)]
        calls.append(make_call(index, prompt, draw(tokens), version=draw(st.integers(0, 3)),
                               masked=draw(st.sampled_from(MASKS)), system=draw(st.sampled_from(SYSTEMS))))
    return calls


@st.composite
def groups(draw, max_groups=3):
    made = []
    for number in range(draw(st.integers(1, max_groups))):
        made.append([
            make_trajectory(draw(call_lists()), reward=draw(st.sampled_from([0.0, 1.0, 0.5])),
                            rollout_id=f"g{number}r{member}", group_id=f"g{number}",
                            end=draw(st.sampled_from(["graded", "harness_failed"])),
                            discarded=draw(st.sampled_from([0, 0, 7])))
            for member in range(draw(st.integers(2, 4)))])
    return made
