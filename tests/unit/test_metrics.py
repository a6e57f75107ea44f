"""The metrics contract: keys, and law 1 per step."""

from hypothesis import given

from lightning_ray.buffer import Dropped, Group
from lightning_ray.observe.metrics import step_metrics
from lightning_ray.trajectory.samples import step_batch
from tests.unit.trajectories import groups, make_call, make_trajectory

KEYS = {
    "step", "policy_version", "wall_s", "rollouts", "reward_mean", "pass_rate", "calls", "tokens_prompt",
    "tokens_sampled", "tokens_trained", "tokens_dropped", "samples", "branches_per_rollout", "rollouts_graded",
    "rollouts_harness_failed", "rollouts_infra_failed", "rollouts_retried", "loss", "grad_norm",
    "clip_fraction", "logprob_gap_mean", "logprob_gap_max", "generate_s", "learn_s", "publish_s",
    "groups_trained", "groups_dropped", "tasks_set_aside",
}


def as_group(members):
    group = Group(members[0].group_id, "t", tuple(member.rollout_id for member in members))
    group.members = {member.rollout_id: member for member in members}
    return group


def metrics_of(made, dropped=(), **changes):
    batch = step_batch(made, advantage="grpo", normalise="rollout", max_tokens=16)
    return step_metrics(step=1, policy_version=1, groups=[as_group(group) for group in made], dropped=dropped,
                        batch=batch, update={"loss": 0.5, "learn_s": 1.0}, wall_s=2.0, generate_s=1.0, **changes)


@given(groups())
def test_law1_holds_in_the_metrics_of_every_step(made):
    metrics = metrics_of(made)
    assert metrics["tokens_sampled"] == metrics["tokens_trained"] + sum(metrics["tokens_dropped"].values())
    assert set(metrics) >= KEYS
    assert metrics["rollouts"] == sum(len(group) for group in made)


def test_dropped_groups_are_in_the_account():
    made = [[make_trajectory([make_call(0, [1], [2, 3])], reward=reward, rollout_id=name)
             for name, reward in (("a", 1.0), ("b", 0.0))]]
    stale = as_group([make_trajectory([make_call(0, [1], [2, 3, 4])], rollout_id="old", group_id="g1")])
    broken = as_group([make_trajectory([], rollout_id="x", group_id="g2", end="infra_failed", discarded=5)])
    metrics = metrics_of(made, [Dropped(stale, "stale"), Dropped(broken, "infra_failed")], heldout_pass_rate=0.25)
    assert metrics["tokens_dropped"] == {"infra_failed": 5, "stale": 3} and metrics["tokens_trained"] == 4
    assert metrics["rollouts_infra_failed"] == 1 and metrics["groups_dropped"] == 2
    assert metrics["pass_rate"] == 0.5 and metrics["heldout_pass_rate"] == 0.25
