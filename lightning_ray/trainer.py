"""Trainer: the loop. Keep groups running, take complete ones, make samples, update the policy, record.

    for step in Trainer(Config.load("jobs/quickstart.yaml")).steps():
        print(step.metrics)

`steps` prepares everything, yields after each policy update, evaluates on held-out tasks before and after, writes the
run directory, and leaves nothing running however it ends. Bad input raises `ConfigError` before anything expensive
starts; a run that cannot go on raises `RunFailed`. In a notebook a run is taken in pieces:

    trainer = Trainer(config)
    next(trainer.steps())          # one update; rollouts in flight go on until the next
    trainer.save(); trainer.stop()
    Trainer(config, resume=trainer.run.root)
"""

import atexit
import errno
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ray import checkpoint
from lightning_ray.admission import Admission, Pressure
from lightning_ray.buffer import Dropped, Group, GroupBuffer
from lightning_ray.config import Config
from lightning_ray.fleet import Fleet, RunnersGone
from lightning_ray.harness.spec import RolloutSpec, rollout_seed
from lightning_ray.observe.metrics import step_metrics
from lightning_ray.observe.peak_memory import PeakMemory
from lightning_ray.observe.progress import Progress
from lightning_ray.observe.records import Records
from lightning_ray.policy.source import policy_directory
from lightning_ray.policy_group import PartDied, PolicyGroup
from lightning_ray.preflight import preflight
from lightning_ray.ray_session import RaySession
from lightning_ray.run_directory import STEP_NAME, RunDirectory
from lightning_ray.statistics import pass_rate
from lightning_ray.tasks.base import Task
from lightning_ray.tasks.source import load_tasks
from lightning_ray.tasks.stream import TaskStream
from lightning_ray.trajectory.archive import group_trajectories, trained_rollouts
from lightning_ray.trajectory.call import Trajectory
from lightning_ray.trajectory.samples import StepBatch, nothing_trained, step_batch

BROKEN_GROUPS_LIMIT = 3
"""The run stops when this many times `groups_per_step` groups in a row could not be run: it is not bad luck."""
CHECK_EVERY_S = 10.0
"""Seconds between looks at the generators: whether they are alive, and how much they have to do."""


class RunFailed(RuntimeError):
    """The run cannot go on. The message says why and what to do; the last checkpoint is kept."""


@dataclass(frozen=True, slots=True)
class Step:
    """One policy update."""

    number: int
    metrics: dict[str, Any]
    trajectories: list[Trajectory]


class Trainer:
    """One run, from warm-up to summary."""

    def __init__(self, config: Config, *, resume: Path | None = None, progress: Progress | None = None):
        self.config = config
        self.progress = progress or Progress()
        self._resume = resume
        self.run: RunDirectory | None = None
        self.summary: dict[str, Any] | None = None
        self._running: Iterator[Step] | None = None

    def steps(self) -> Iterator[Step]:
        """Yields after each update until `run.steps` are done. There is one such iterator: whoever leaves it early
        goes on with it by asking again, or ends the run by `stop`."""
        if self._running is None:
            self._running = self._run()
            atexit.register(self.stop)  # of a script that left the loop; before Ray's own end, since it came later
        return self._running

    def save(self) -> None:
        """Writes a checkpoint of the last step, as `run.checkpoint_every` does. Between steps only."""
        checkpoint.save(self.run, self._stand(), self._save_policy,
                        keep=self.config.run.checkpoints_kept, carried=self.buffer.complete,
                        max_tokens=self.config.policy.max_context)

    def stop(self) -> None:
        """Ends all that was started. A resume goes on after the last step; it is quicker after a `save`. Idempotent."""
        if self._running is not None:
            self._running.close()
        atexit.unregister(self.stop)

    def _run(self) -> Iterator[Step]:
        try:
            self._prepare()
            self._start()
            if self.state.heldout_before is None:
                self.state.heldout_before = self.evaluate("before")
                self.save()
            while self.state.step < self.config.run.steps:
                yield self._step()
            self._conclude()
        except (PartDied, RunnersGone) as error:
            raise RunFailed(str(error)) from error
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise RunFailed(f"run.dir: {self.config.run.dir} is full. Free space there") from error
        finally:
            self._close()

    # Preparation: cheap checks first, then the run directory, then the parts.

    def _prepare(self) -> None:
        self._began = time.monotonic()
        self.progress.phase("checking")
        preflight(self.config)
        splits = load_tasks(self.config.tasks)
        self._heldout = splits.heldout
        if self._resume is None:
            self.run, self.state = RunDirectory.create(self.config), checkpoint.LoopState()
            self._restore_from = None
        else:
            self.run = RunDirectory.existing(self._resume)
            self._restore_from, self._restored = checkpoint.last(self.run)
            self.state = checkpoint.noted(self.run, self._restored)
            self.run.forget_after(self.state.step)
        self._wall_before = self.state.wall_s
        self.stream = TaskStream(splits.train, self.config.run.seed, cursor=self.state.cursor,
                                 requeued=self.state.requeued, set_aside=self.state.set_aside)
        self.records = Records(self.run, self.config)
        self.progress.phase(f"run directory: {self.run.root}")
        self.progress.phase("warming up the policy" if self.config.policy.path is None else "reading the policy")
        self.model_dir = policy_directory(self.config.policy, self.config, self.progress)

    def _start(self) -> None:
        schedule = self.config.schedule
        self.memory = PeakMemory.start()
        self.progress.phase("starting Ray")
        self.ray = RaySession.start(self.config)
        self.progress.phase("starting all parts")
        self.policy = PolicyGroup.start(self.config, self.model_dir, total_steps=self.config.run.steps)
        self.fleet = Fleet.start(self.config, self.run, str(self.model_dir), self.policy.generators)
        self.policy.ready()
        if self._restore_from is not None:
            self.policy.load(self._restore_from / "policy", self._restored.policy_version)
            self._learn_again()
        self.fleet.ready()
        self.buffer = GroupBuffer(groups_per_step=schedule.groups_per_step, groups_in_flight=schedule.groups_in_flight,
                                  max_staleness=schedule.max_staleness, resample=schedule.resample_zero_variance,
                                  stale_limit=schedule.stale_limit, stale_in_a_row=self.state.stale_in_a_row)
        if self._restore_from is not None:
            noted = self.state.step > self._restored.step
            self.buffer.restore(checkpoint.carried(self.run.root if noted else self._restore_from, self.state))
        self._admission = None
        if schedule.admission == "pressure":
            self._admission = Admission(schedule.group_size, schedule.group_size * schedule.groups_in_flight)
            self.fleet.admit(self._admission.limit)
        self._broken_in_a_row = 0
        self._checked = time.monotonic()

    def _learn_again(self) -> None:
        """The steps that were recorded after the checkpoint, from their rollouts: the same updates (law 9)."""
        for number in range(self._restored.step + 1, self.state.step + 1):
            self.progress.phase(f"learning recorded step {number}")
            recorded = self.run.rollouts / f"{STEP_NAME.format(number)}.parquet"
            batch = self._batch(group_trajectories(trained_rollouts(recorded)))
            if batch.samples:
                self.policy.update(batch.samples)
        if self.policy.version != self.state.policy_version:
            raise RunFailed(f"the rollouts recorded since {self._restore_from} make policy version "
                            f"{self.policy.version}, not {self.state.policy_version}: the record was changed. Remove "
                            f"{self.run.root / checkpoint.NOTE} to go on from the checkpoint")

    # One step.

    def _step(self) -> Step:
        started = time.monotonic()
        number = self.state.step + 1
        self.progress.phase("rollouts")
        groups, dropped = self._collect()
        generated = time.monotonic()

        batch = self._batch([group.trajectories for group in groups])
        self.progress.phase("learning")
        update = self._update(batch)

        self.state.step, self.state.policy_version = number, self.policy.version
        heldout = self._evaluation_due(number)
        metrics = step_metrics(
            step=number, policy_version=self.policy.version, groups=groups, dropped=dropped, batch=batch,
            update=update, wall_s=self._wall(), generate_s=generated - started,
            heldout_pass_rate=heldout["rate"] if heldout else None)
        self.state.tokens_sampled += metrics["tokens_sampled"]
        self.records.step(metrics, groups, dropped, batch.silent)
        checkpoint.note(self.run, self._stand(), carried=self.buffer.complete,
                        max_tokens=self.config.policy.max_context)
        self.progress.step(metrics)
        if number % self.config.run.checkpoint_every == 0 or number == self.config.run.steps:
            self.save()
        return Step(number, metrics, [member for group in groups for member in group.trajectories])

    def _batch(self, groups: Sequence[Sequence[Trajectory]]) -> StepBatch:
        return step_batch(groups, advantage=self.config.algorithm.advantage, normalise=self.config.algorithm.normalise,
                          max_tokens=self.config.policy.max_context, train=self.config.capture.train)

    def _collect(self) -> tuple[list[Group], list[Dropped]]:
        """Keeps groups running until enough are complete."""
        dropped: list[Dropped] = []
        total = self.config.schedule.groups_per_step * self.config.schedule.group_size
        while True:
            self._fill()
            for trajectory in self._ended():
                self.buffer.finish(trajectory)
            for drop in self.buffer.drop_unusable(self.policy.version):
                dropped.append(drop)
                self._account_for(drop)
            self.progress.rollouts(sum(len(group.members) for group in self.buffer.held), total)
            if groups := self.buffer.take():
                self._broken_in_a_row = 0
                return groups, dropped

    def _ended(self) -> list[Trajectory]:
        """Rollouts that ended; now and then a look at the generators that they wait for."""
        if time.monotonic() - self._checked > CHECK_EVERY_S:
            health = self.policy.check()
            if self._admission is not None:
                self.fleet.admit(self._admission.look(Pressure.of(health), self.fleet.running))
            self._checked = time.monotonic()
        return self.fleet.ended()

    def _fill(self) -> None:
        size = self.config.schedule.group_size
        for _ in range(self.buffer.vacancies):
            task = self.stream.next()
            group_id = f"g{self.state.groups_started:06d}"
            self.state.groups_started += 1
            rollouts = [f"{group_id}-r{member}" for member in range(size)]
            self.buffer.start(group_id, task.instance_id, rollouts)
            for rollout_id in rollouts:
                self.fleet.submit(self._spec(rollout_id, group_id, task, "train"))

    def _account_for(self, drop: Dropped) -> None:
        if drop.reason == "stale":
            self.stream.requeue(drop.group.task_id)
        elif drop.reason == "set_aside":
            self._put_aside(drop.group.task_id)
        if drop.reason != "infra_failed":
            return
        self._broken_in_a_row += 1
        failed = next(member for member in drop.group.trajectories if member.end == "infra_failed")
        self.progress.note(f"group {drop.group.group_id} dropped: {failed.rollout_id} failed for reasons of ours: "
                           f"{failed.reason}")
        if self._broken_in_a_row >= BROKEN_GROUPS_LIMIT * self.config.schedule.groups_per_step:
            raise RunFailed(f"{self._broken_in_a_row} groups in a row could not be run. The last one: {failed.reason}. "
                            f"Mend this, then go on with --resume {self.run.root}")

    def _put_aside(self, task_id: str) -> None:
        schedule = self.config.schedule
        self.stream.put_aside(task_id)
        self.progress.note(
            f"task {task_id} is set aside: its rollouts took longer than schedule.max_staleness "
            f"({schedule.max_staleness}) updates {schedule.stale_limit} times in a row")
        if self.stream.exhausted:
            raise RunFailed("every training task takes longer than schedule.max_staleness updates. Raise it, or lower "
                            "schedule.groups_in_flight or harness.timeout_s")

    def _update(self, batch: StepBatch) -> dict[str, Any]:
        if not batch.samples:
            self.progress.note(f"there is nothing to learn from this step: {nothing_trained(batch)}")
            return {"learn_s": 0.0, "publish_s": 0.0}
        update = self.policy.update(batch.samples)
        gap, limit = update.get("logprob_gap_mean"), self.config.run.logprob_gap_limit
        if gap is not None and gap > limit:
            raise RunFailed(
                f"learner and generator disagree: mean |difference of log-probs| {gap:.4f} is over "
                f"run.logprob_gap_limit {limit}. The weights that were published are not the ones that learn, or their "
                f"precision is too low (generator.dtype: {self.config.generator.dtype})")
        return update

    # Evaluation.

    def evaluate(self, when: str, tasks: list[Task] | None = None) -> dict[str, Any] | None:
        """Pass rate on held-out tasks with its interval, or None where there are no held-out tasks. Training rollouts
        that end meanwhile go into the buffer as always."""
        tasks = self._heldout if tasks is None else tasks
        if not tasks:
            return None
        self.progress.phase(f"held-out tasks, {when}")
        group_id = f"heldout-{self.state.step:06d}"
        waiting = {f"{group_id}-t{number:05d}": task for number, task in enumerate(tasks)}
        for rollout_id, task in waiting.items():
            self.fleet.submit(self._spec(rollout_id, group_id, task, "evaluate"))
        done: dict[str, Trajectory] = {}
        while len(done) < len(waiting):
            for trajectory in self._ended():
                if trajectory.rollout_id in waiting:
                    done[trajectory.rollout_id] = trajectory
                else:
                    self.buffer.finish(trajectory)
            self.progress.rollouts(len(done), len(waiting))
        ordered = [done[rollout_id] for rollout_id in waiting]
        self.records.heldout(self.state.step, ordered)
        valid = [trajectory for trajectory in ordered if trajectory.end != "infra_failed"]
        if not valid:
            raise RunFailed(f"no held-out rollout could be run: {ordered[0].reason}")
        result = pass_rate(sum(trajectory.passed for trajectory in valid), len(valid))
        result["infra_failed"] = len(ordered) - len(valid)
        self.progress.heldout(when, result)
        return result

    def _evaluation_due(self, number: int) -> dict[str, Any] | None:
        every = self.config.evaluation.every
        if not every or number % every or number == self.config.run.steps:
            return None
        return self.evaluate(f"step {number}", self._heldout[: self.config.evaluation.tasks])

    def _spec(self, rollout_id: str, group_id: str, task: Task, mode: str) -> RolloutSpec:
        sampling = self.config.sampling if mode == "train" else self.config.evaluation
        return RolloutSpec(rollout_id=rollout_id, group_id=group_id, task=task, mode=mode,
                           temperature=sampling.temperature, seed=rollout_seed(self.config.run.seed, rollout_id))

    # The end.

    def _conclude(self) -> None:
        after = self.evaluate("after")
        self.progress.phase("finishing")
        self.summary = self.records.conclude(self.state, after, self._wall(), self.memory.stop(), self.fleet.facts)
        self.progress.summary(self.run, self.summary)

    def _save_policy(self, directory: Path) -> None:
        """For `--resume`, and beside it as a Hugging Face checkpoint, for everything else."""
        self.policy.save(directory / "policy")
        self.policy.export(directory / "policy")

    def _stand(self) -> checkpoint.LoopState:
        """The state of the loop now. A resumed run starts the groups anew that still run."""
        unfinished = [group.task_id for group in self.buffer.held if not group.complete]
        return self.state.model_copy(update={
            "cursor": self.stream.cursor, "requeued": unfinished + self.stream.requeued,
            "set_aside": self.stream.set_aside, "stale_in_a_row": dict(self.buffer.stale_in_a_row),
            "wall_s": self._wall()})

    def _wall(self) -> float:
        return self._wall_before + time.monotonic() - self._began

    def _close(self) -> None:
        """Ends every part that was started, the last one first. A second Ctrl-C does not interrupt it half-way."""
        if "memory" in self.__dict__:  # the first that is started
            self.progress.phase("stopping")
        for name in ("fleet", "policy", "ray", "memory", "records"):
            part = self.__dict__.pop(name, None)
            if part is None:
                continue
            try:
                part.stop() if hasattr(part, "stop") else part.shutdown()
            except KeyboardInterrupt:
                pass
            except Exception as error:  # its actors may have been told to stop, too; the others end all the same
                self.progress.note(f"{name} did not end as it should: {type(error).__name__}: "
                                   f"{str(error).partition(chr(10))[0]}")
        if self.run is not None and self._resume is None:
            self.run.remove_if_empty()
        self.progress.close()
