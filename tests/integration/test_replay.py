"""Replays of a recorded run: the same rollouts give the same weights, bit for bit (law 9)."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from lightning_ray.cli import BAD_INPUT, main
from lightning_ray.config import Config
from lightning_ray.replay import Replay
from lightning_ray.run_directory import RunDirectory
from lightning_ray.trajectory.archive import write_rollouts
from tests.unit.trajectories import make_call, make_trajectory

pytestmark = pytest.mark.timeout(300)
STEPS = 3


@pytest.fixture(scope="module")
def config(tiny_model_dir, tmp_path_factory):
    return Config(run={"dir": tmp_path_factory.mktemp("runs"), "name": "recorded", "steps": STEPS},
                  policy={"path": tiny_model_dir}, learner={"dtype": "float32", "threads": 1, "lr": 1e-3})


@pytest.fixture(scope="module")
def recorded(config) -> RunDirectory:
    """Three steps; in each one a group that is learned from, one that compares nothing and one that was too old."""
    run = RunDirectory.create(config)
    for step in range(1, STEPS + 1):
        members = [make_trajectory([make_call(0, range(20 + step), range(50 + n, 70 + 3 * n), version=step - 1)],
                                   reward=float(n % 2 == 0 and group != 1), rollout_id=f"s{step}g{group}r{n}",
                                   group_id=f"s{step}g{group}")
                   for group in range(3) for n in range(3)]
        write_rollouts(run.rollouts / f"step_{step:06d}.parquet", members, max_tokens=2048, dropped={
            **{f"s{step}g1r{n}": "zero_variance" for n in range(3)}, **{f"s{step}g2r{n}": "stale" for n in range(3)}})
    return run


def weights(directory: Path) -> dict[str, bytes]:
    found = load_file(directory / "model.safetensors")
    return {name: tensor.float().numpy().tobytes() for name, tensor in found.items()}


def test_law9_two_replays_give_the_same_weights_bit_for_bit(ray_session, config, recorded, tiny_model_dir):
    replays, metrics = [], []
    for _ in range(2):
        replays.append(Replay(config, recorded.root))
        metrics.append(list(replays[-1].steps()))
    first, second = (weights(replay.run.root / "policy") for replay in replays)
    assert first == second
    start = weights(Path(tiny_model_dir))
    assert first.keys() == start.keys() and first != start, "something was learned"
    assert [line["loss"] for line in metrics[0]] == [line["loss"] for line in metrics[1]]
    for line in metrics[0]:
        assert (line["groups_trained"], line["rollouts"]) == (2, 6), "what was too old was not trained"
        assert line["tokens_sampled"] == line["tokens_trained"] + line["tokens_dropped"]["zero_variance"]
    assert [line["policy_version"] for line in replays[0].run.metrics()] == [1, 2, 3]


def test_a_run_without_record_is_bad_input(config, tmp_path, capsys):
    empty = RunDirectory.create(config.model_copy(update={"run": config.run.model_copy(update={"dir": tmp_path})}))
    assert main(["train", "--replay", str(empty.root)]) == BAD_INPUT
    assert "no recorded step" in capsys.readouterr().err
    assert main(["train", "--replay", str(empty.root), "--resume", str(empty.root)]) == BAD_INPUT
