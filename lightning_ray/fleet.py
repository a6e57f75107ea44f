"""Fleet: the proxies and runners of a run, and which rollout goes where.

    fleet = Fleet.start(config, run, model_dir, generators)    # parts begin to start, generators may still do so
    fleet.ready()

Each runner has a proxy beside it on its node: the two share one bundle of a placement group that spreads over nodes.
A rollout is one actor call on a runner; its trajectory comes back as an `ObjectRef` that the caller owns, so that it
outlives the runner. A runner that dies is started again by Ray, on another node where its own is gone; until it answers
it is given nothing, and the rollouts it held start again on the others, a bounded number of times, under the same id.
What its proxy, where that lives, had recorded for them is closed, and counted as discarded.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lightning_ray.calls import end
from lightning_ray.config import Config
from lightning_ray.dispatch import Dispatch, Start
from lightning_ray.harness import stages
from lightning_ray.harness.runner import Runner
from lightning_ray.harness.spec import RolloutSpec
from lightning_ray.harness.stages import Attempt, Failure
from lightning_ray.proxy.actor import Proxy
from lightning_ray.ray_session import Loose, reserve
from lightning_ray.run_directory import RunDirectory
from lightning_ray.trajectory.call import Trajectory

log = logging.getLogger(__name__)

WAIT_S = 0.5
"""Longest wait for a rollout before the caller gets a chance to show progress or to be interrupted."""
STOP_TIMEOUT_S, STOP_AWAY_TIMEOUT_S = 30, 2
"""The second for a runner that is down and its proxy: their node may be gone."""
WAIT_AT_ONCE = 32
"""Most ended rollouts handed over at once."""


class RunnersGone(RuntimeError):
    """Every runner died and cannot be started again."""


@dataclass(slots=True)
class Fleet:
    """Submits rollouts and hands over trajectories as they end. It knows nothing of groups."""

    runners: list[ActorHandle]
    proxies: list[ActorHandle]
    pairs: PlacementGroup
    retries: int
    facts: dict = field(default_factory=dict)
    """What the sandbox is, as the first runner has it."""
    _starting: list[ray.ObjectRef] = field(default_factory=list)
    _dispatch: Dispatch = field(init=False)
    _pending: dict[ray.ObjectRef, Start] = field(default_factory=dict)
    _coming_back: dict[ray.ObjectRef, int] = field(default_factory=dict)
    """Reference that is ready when the runner with that number answers again."""
    _abandoned: dict[str, list[ray.ObjectRef]] = field(default_factory=dict)
    """By rollout: the tokens that were sampled for it on runners that died, as their proxies say."""
    _dead: int = 0
    """Runners that cannot be started again."""

    def __post_init__(self) -> None:
        self._dispatch = Dispatch(len(self.runners))

    @classmethod
    def start(cls, config: Config, run: RunDirectory, model_dir: str, generators: Sequence[ActorHandle]) -> "Fleet":
        """Begins to start all parts; `ready` waits for them. Raises `ConfigError` where the cluster has no room."""
        def proxy(number: int, place: dict[str, Any]) -> ActorHandle:
            journal = run.root / "journal" / str(number)
            return Proxy.options(**place).remote(config.proxy, config.policy, model_dir, Loose(list(generators)),
                                                 str(journal))

        return cls.beside(config, proxy)

    @classmethod
    def beside(cls, config: Config, proxy: Callable[[int, dict[str, Any]], ActorHandle]) -> "Fleet":
        """Runners beside proxies of any kind: `proxy(number, options)` creates the actor beside that runner."""
        pairs = reserve([{"CPU": config.runners.cpus, **config.runners.resources}] * config.runners.count, "SPREAD",
                        "runners.count, runners.cpus")
        proxies, runners = [], []
        for number in range(config.runners.count):
            bundle = PlacementGroupSchedulingStrategy(pairs, placement_group_bundle_index=number)
            place = {"max_restarts": -1, "num_cpus": config.runners.cpus / 2, "scheduling_strategy": bundle}
            proxies.append(proxy(number, place))
            runners.append(Runner.options(**place).remote(config, Loose(proxies[-1])))
        fleet = cls(runners, proxies, pairs, config.runners.infra_retries)
        fleet._starting = [part.start.remote() for part in (*runners, *proxies)]
        return fleet

    def ready(self) -> None:
        """Waits until each part says that it is ready. Raises what a part raises; `stop` ends the others."""
        self.facts = ray.get(self._starting)[0]

    @property
    def running(self) -> int:
        return self._dispatch.running

    def submit(self, spec: RolloutSpec) -> None:
        """To the runner that holds the fewest rollouts, in its turn where the limit is reached."""
        self._dispatch.submit(spec)
        self._start_next()

    def admit(self, limit: int) -> None:
        """At most so many rollouts (at least 1) run at once from now on. None is stopped that runs already."""
        self._dispatch.limit = limit
        self._start_next()

    def ended(self) -> list[Trajectory]:
        """Rollouts that ended since the last call; waits a moment where there is none yet. Raises `RunnersGone`."""
        self._welcome_back()
        self._start_next()
        if not self._pending:
            if self._dispatch.waiting:
                time.sleep(WAIT_S)
            return []
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=WAIT_S)
        if ready and len(self._pending) > 1:
            ready, _ = ray.wait(list(self._pending), num_returns=min(len(self._pending), WAIT_AT_ONCE), timeout=0)
        ended = [trajectory for ref in ready if (trajectory := self._take(ref)) is not None]
        self._start_next()
        return ended

    def run(self, specs: Sequence[RolloutSpec]) -> Iterator[Trajectory]:
        """Runs all of `specs`, hands over their trajectories as they end. Nothing else may be pending."""
        for spec in specs:
            self.submit(spec)
        while self._pending or self._dispatch.waiting:
            yield from self.ended()

    def stop(self) -> None:
        """Ends every rollout and every process of the runners and proxies."""
        self._pending.clear()
        self._dispatch.clear()
        away = self._dispatch.away
        for parts in (self.runners, self.proxies):  # runners first: they ask the proxies
            end([part for number, part in enumerate(parts) if number not in away], STOP_TIMEOUT_S)
            end([parts[number] for number in away], STOP_AWAY_TIMEOUT_S)
        remove_placement_group(self.pairs)

    def _start_next(self) -> None:
        while (start := self._dispatch.next()) is not None:
            self._pending[self.runners[start.runner].run.remote(start.spec)] = start

    def _take(self, ref: ray.ObjectRef) -> Trajectory | None:
        start = self._pending.pop(ref)
        try:
            trajectory = ray.get(ref)
        except RayActorError as error:
            return self._lost(start, error)
        self._dispatch.ended(start)
        return self._counted(trajectory)

    def _lost(self, start: Start, error: RayActorError) -> Trajectory | None:
        """A rollout whose runner died: started again, or at last given up."""
        log.warning("runner %d died with rollout %s (%s)", start.runner, start.spec.rollout_id, type(error).__name__)
        if self._dispatch.down(start.runner):
            self._await(start.runner)
        names = [start.spec.attempt(number) for number in range(self.retries + 1)]
        self._abandoned.setdefault(start.spec.rollout_id, []).append(self.proxies[start.runner].abandon.remote(names))
        if start.spec.lost < self.retries:
            self._dispatch.lost(start)
            return None
        self._dispatch.ended(start)
        died = Failure("infra", "run", f"its runner died {start.spec.lost + 1} times")
        return self._counted(stages.trajectory(start.spec, [Attempt(failure=died)], {}))

    def _counted(self, trajectory: Trajectory) -> Trajectory:
        """With the tokens of attempts on runners that died, as far as they are known by now: a proxy that went with its
        node does not answer."""
        if refs := self._abandoned.pop(trajectory.rollout_id, None):
            for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
                with suppress(RayError):
                    trajectory.discarded_tokens += ray.get(ref)
        return trajectory

    def _await(self, runner: int) -> None:
        self._coming_back[self.runners[runner].start.options(max_task_retries=-1).remote()] = runner

    def _welcome_back(self) -> None:
        """Runners that were down and answer again are given rollouts again."""
        if not self._coming_back:
            return
        for ref in ray.wait(list(self._coming_back), num_returns=len(self._coming_back), timeout=0)[0]:
            runner = self._coming_back.pop(ref)
            try:
                ray.get(ref)
            except RayError as error:
                self._gone(runner, error)
            else:
                log.warning("runner %d is back", runner)
                self._dispatch.up(runner)

    def _gone(self, runner: int, error: RayError) -> None:
        log.warning("runner %d cannot be started again: %s", runner, error)
        self._dead += 1
        if self._dead == len(self.runners):
            raise RunnersGone(f"every runner died and cannot be started again. The last one: {error}") from error
