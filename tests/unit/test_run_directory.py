"""What a run leaves behind can be trusted, whatever moment it ended at."""

import json
import shutil

import pytest

from lightning_ray import checkpoint
from lightning_ray.buffer import GroupBuffer
from lightning_ray.checkpoint import LoopState
from lightning_ray.config import Config, ConfigError, RunConfig
from lightning_ray.run_directory import RunDirectory
from tests.unit.trajectories import make_call, make_trajectory


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(Config(run=RunConfig(dir=tmp_path, name="a")))


def save(run, step, keep=2):
    return checkpoint.save(run, LoopState(step=step), lambda path: (path / "policy").mkdir(), keep=keep)


def test_each_run_has_a_directory_of_its_own(run, tmp_path):
    again = RunDirectory.create(Config(run=RunConfig(dir=tmp_path, name="a")))
    assert (run.root.name, again.root.name) == ("a", "a-2")
    assert Config.load(run.root / "config.yaml").run.name == "a"


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir: .*file"):
        RunDirectory.create(Config(run=RunConfig(dir=tmp_path / "file" / "runs")))


def test_the_last_checkpoints_are_kept(run):
    for step in (1, 2, 3):
        save(run, step)
    assert [path.name for path in run.complete_checkpoints()] == ["step_000002", "step_000003"]
    path, state = checkpoint.last(run)
    assert path.name == "step_000003" and state.step == 3


def test_a_checkpoint_that_broke_off_is_not_trusted(run):
    save(run, 1)

    def breaks(path):
        (path / "policy").mkdir()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        checkpoint.save(run, LoopState(step=2), breaks, keep=2)
    assert checkpoint.last(run)[1].step == 1


def test_the_last_recorded_step_is_known_between_checkpoints(run):
    save(run, 2)
    _, state = checkpoint.last(run)
    assert checkpoint.noted(run, state) == state
    checkpoint.note(run, LoopState(step=4, cursor=9, requeued=["t"]))
    assert checkpoint.noted(run, state) == LoopState(step=4, cursor=9, requeued=["t"])
    save(run, 5)
    assert checkpoint.noted(run, checkpoint.last(run)[1]).step == 5, "a checkpoint that is newer wins"


def test_a_checkpoint_that_is_there_is_not_written_anew(run):
    save(run, 1)

    def never(path):
        raise AssertionError("written anew")

    assert checkpoint.save(run, LoopState(step=1), never, keep=1) == run.checkpoint(1)


def test_without_a_checkpoint_there_is_nothing_to_resume(run, tmp_path):
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        checkpoint.last(run)
    with pytest.raises(ConfigError, match="no run directory"):
        RunDirectory.existing(tmp_path / "nothing")


def test_what_was_recorded_after_the_checkpoint_is_forgotten(run):
    for step in (1, 2, 3):
        run.append_metrics({"step": step})
        (run.rollouts / f"step_{step:06d}.parquet").write_text("x")
    with run.metrics_file.open("a") as file:
        file.write('{"step": 4, "torn')
    (run.rollouts / "heldout_000000.parquet").write_text("x")
    (run.rollouts / "step_000004.partial").write_text("x")
    save(run, 2)
    run.forget_after(2)
    assert [line["step"] for line in run.metrics()] == [1, 2]
    assert sorted(path.stem for path in run.rollouts.iterdir()) == ["heldout_000000", "step_000001", "step_000002"]


def test_what_a_person_laid_beside_our_files_stays(run):
    save(run, 2)
    shutil.copytree(run.checkpoint(2), run.checkpoints / "step_000002_best")
    (run.checkpoints / "zz").mkdir()
    (run.rollouts / "notes.txt").write_text("read g000003-r1")
    save(run, 3)
    run.forget_after(2)
    assert checkpoint.last(run)[0].name == "step_000002"
    save(run, 4, keep=1)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step_000002_best", "step_000004", "zz"]
    assert (run.rollouts / "notes.txt").exists()


def test_a_state_that_cannot_be_read_is_named_with_the_way_out(run):
    save(run, 1)
    for file in (run.checkpoint(1) / checkpoint.NOTE, run.root / checkpoint.NOTE):
        file.write_text('{"step": 2')
    with pytest.raises(ConfigError, match=r"step_000001/state\.json cannot be read .* Remove it"):
        checkpoint.last(run)
    with pytest.raises(ConfigError, match=r"a/state\.json cannot be read .* Remove it"):
        checkpoint.noted(run, LoopState())


def test_of_a_run_that_recorded_nothing_nothing_stays(run, tmp_path):
    other = RunDirectory.create(Config(run=RunConfig(dir=tmp_path, name="b")))
    evaluation = RunDirectory.create(Config(run=RunConfig(dir=tmp_path, name="c")))
    (other.rollouts / "heldout_000000.parquet").write_text("x")
    (evaluation.root / "results.json").write_text("{}")
    run.tensorboard.mkdir()
    (run.tensorboard / "events").write_text("x")
    for each in (run, other, evaluation):
        each.remove_if_empty()
    assert other.root.is_dir() and evaluation.root.is_dir() and not run.root.exists()


def test_metrics_are_on_disk_at_once(run):
    run.append_metrics({"step": 1, "tokens_dropped": {"stale": 2}})
    assert json.loads(run.metrics_file.read_text()) == {"step": 1, "tokens_dropped": {"stale": 2}}


def test_complete_groups_that_wait_are_kept_with_a_checkpoint_and_go_first(tmp_path):
    run = RunDirectory.create(Config(run={"dir": tmp_path}))
    buffer = GroupBuffer(groups_per_step=1, groups_in_flight=3, max_staleness=9)
    for name in "abc":
        buffer.start(name, f"task {name}", [f"{name}/0", f"{name}/1"])
    for rollout_id in ("b/1", "b/0", "c/0", "c/1", "a/1"):
        call = make_call(0, [1, 2], [3, 4], version=3)
        buffer.finish(make_trajectory([call], rollout_id=rollout_id, group_id=rollout_id[0], reward=0.5))
    path = checkpoint.save(run, LoopState(step=1), lambda _: None, keep=1, carried=buffer.complete, max_tokens=9)
    for step in (1, 2):
        checkpoint.note(run, LoopState(step=step), carried=buffer.complete, max_tokens=9)
    assert [each.name for each in run.root.glob("carried_*")] == ["carried_000002.parquet"]
    noted = [group.group_id for group in checkpoint.carried(run.root, LoopState(step=2))]
    checkpoint.note(run, LoopState(step=2))
    assert not list(run.root.glob("carried_*")), "a step that was done again left none"
    resumed = GroupBuffer(groups_per_step=1, groups_in_flight=3, max_staleness=9)
    resumed.restore(checkpoint.carried(path, LoopState(step=1)))
    assert noted == [group.group_id for group in resumed.held] == ["b", "c"]
    assert resumed.vacancies == 1, "the group that still ran is started again"
    (group,) = resumed.take()
    assert (group.group_id, group.rollout_ids, group.oldest_version) == ("b", ("b/0", "b/1"), 3)
    assert [member.reward for member in group.trajectories] == [0.5, 0.5]
    assert [group.group_id for group in resumed.take()] == ["c"]


def test_a_checkpoint_without_waiting_groups_has_none(tmp_path):
    run = RunDirectory.create(Config(run={"dir": tmp_path}))
    assert checkpoint.carried(checkpoint.save(run, LoopState(step=1), lambda _: None, keep=1), LoopState(step=1)) == []
