"""GroupBuffer: which groups run, which are complete, which are too old. Pure: it owns no task, clock or client.

A group is held from its start until it is taken for an update or dropped. At most `groups_in_flight` groups are
held; `take` gives `groups_per_step` complete ones, the oldest start first, so that short rollouts are not favoured
and carried-over groups go before new ones. `groups_in_flight == groups_per_step` is the synchronous schedule.

A group leaves without being trained, whole, for one of four reasons: `stale` (a token older than `max_staleness`
policy versions; its task is to be queued again), `set_aside` (the same, but the task's groups were too old as soon as
they were complete `stale_limit` times in a row: it takes longer than the schedule has, and is not to be run again),
`infra_failed` (a member that could not be run, retries included), or `resampled` (all rewards equal; at most `resample`
groups for each `take`, so that a step fills at last).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_ray.trajectory.advantages import zero_variance
from lightning_ray.trajectory.call import Trajectory


@dataclass(slots=True)
class Group:
    """The rollouts of one task in one step."""

    group_id: str
    task_id: str
    rollout_ids: tuple[str, ...]
    members: dict[str, Trajectory] = field(default_factory=dict)
    oldest_version: int | None = None
    """The policy version of the oldest token so far that could be trained; None where there is none."""
    has_waited: bool = False
    """It was complete and young enough at an earlier look: if it grows too old, the wait is to blame, not the task."""

    @classmethod
    def of(cls, members: Sequence[Trajectory]) -> "Group":
        """A complete group of these rollouts, in this order."""
        group = cls(members[0].group_id, members[0].task_id, tuple(member.rollout_id for member in members))
        for member in members:
            group.add(member)
        return group

    def add(self, member: Trajectory) -> None:
        """A rollout of the group ended."""
        self.members[member.rollout_id] = member
        versions = [int(call.versions.min()) for call in member.calls if call.masked is None and len(call.versions)]
        if self.oldest_version is not None:
            versions.append(self.oldest_version)
        self.oldest_version = min(versions, default=None)

    @property
    def complete(self) -> bool:
        return len(self.members) == len(self.rollout_ids)

    @property
    def broken(self) -> bool:
        """A member failed for reasons of ours: there is nothing to compare the others with."""
        return any(member.end == "infra_failed" for member in self.members.values())

    @property
    def trajectories(self) -> list[Trajectory]:
        """In the order of `rollout_ids`, whatever the order in which they ended (law 9)."""
        return [self.members[rollout_id] for rollout_id in self.rollout_ids]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A group that is not trained, and why."""

    group: Group
    reason: str
    """`stale`, `set_aside`, `infra_failed` or `resampled`."""


class GroupBuffer:
    """Holds the groups of a run. Every trajectory that goes in comes out exactly once: taken or dropped."""

    def __init__(self, *, groups_per_step: int, groups_in_flight: int, max_staleness: int, resample: int = 0,
                 stale_limit: int = 3, stale_in_a_row: Mapping[str, int] | None = None):
        if groups_in_flight < groups_per_step:
            raise ValueError(f"groups_in_flight {groups_in_flight} < groups_per_step {groups_per_step}")
        self.groups_per_step = groups_per_step
        self.groups_in_flight = groups_in_flight
        self.max_staleness = max_staleness
        self.resample = resample
        self.stale_limit = stale_limit
        self.stale_in_a_row = Counter(stale_in_a_row or {})
        """By task: how often in a row its groups were too old as soon as they were complete."""
        self._resampled = 0
        self._held: dict[str, Group] = {}
        self._group_of: dict[str, str] = {}

    @property
    def vacancies(self) -> int:
        """How many groups are to be started now."""
        return self.groups_in_flight - len(self._held)

    @property
    def held(self) -> list[Group]:
        """Running and complete groups, the oldest start first."""
        return list(self._held.values())

    @property
    def complete(self) -> list[Group]:
        """Complete groups, the oldest start first."""
        return [group for group in self.held if group.complete]

    def restore(self, groups: Sequence[Group]) -> None:
        """Complete groups of an earlier process, before anything is started; the oldest start first."""
        for group in groups:
            group.has_waited = True
            self._held[group.group_id] = group

    def start(self, group_id: str, task_id: str, rollout_ids: Sequence[str]) -> None:
        """A group was submitted. Raises ValueError where there is no vacancy or an id is known already."""
        if not self.vacancies:
            raise ValueError(f"{len(self._held)} groups are held already, no vacancy for {group_id}")
        if group_id in self._held or any(rollout_id in self._group_of for rollout_id in rollout_ids):
            raise ValueError(f"group {group_id} or one of its rollouts is held already")
        self._held[group_id] = Group(group_id, task_id, tuple(rollout_ids))
        self._group_of.update(dict.fromkeys(rollout_ids, group_id))

    def finish(self, trajectory: Trajectory) -> None:
        """A rollout ended. Raises KeyError for one that is not awaited (unknown, or ended before)."""
        group = self._held[self._group_of.pop(trajectory.rollout_id)]
        group.add(trajectory)

    def drop_unusable(self, version: int) -> list[Dropped]:
        """Removes complete groups that are not to be trained at policy version `version` and gives them back."""
        dropped = []
        for group in self.complete:
            oldest = group.oldest_version
            if group.broken:
                dropped.append(Dropped(group, "infra_failed"))
            elif oldest is not None and version - oldest > self.max_staleness:
                dropped.append(Dropped(group, self._too_old(group)))
            elif self._resampled < self.resample and zero_variance([each.reward for each in group.trajectories]):
                dropped.append(Dropped(group, "resampled"))
                self._resampled += 1
            else:
                group.has_waited = True
        for drop in dropped:
            del self._held[drop.group.group_id]
        return dropped

    def _too_old(self, group: Group) -> str:
        if group.has_waited:
            return "stale"
        self.stale_in_a_row[group.task_id] += 1
        if self.stale_in_a_row[group.task_id] < self.stale_limit:
            return "stale"
        del self.stale_in_a_row[group.task_id]
        return "set_aside"

    def take(self) -> list[Group] | None:
        """`groups_per_step` complete groups, the oldest start first, or None where there are fewer."""
        complete = self.complete
        if len(complete) < self.groups_per_step:
            return None
        self._resampled = 0
        taken = complete[: self.groups_per_step]
        for group in taken:
            del self._held[group.group_id]
            self.stale_in_a_row.pop(group.task_id, None)
        return taken
