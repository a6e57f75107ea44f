"""Detection of cgroups from what real machines say, what is written into them, and the janitor."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lightning_ray.sandbox import limits
from lightning_ray.sandbox.base import Limits

HYBRID_MOUNTS = """\
30 23 0:26 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
33 30 0:29 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
34 30 0:30 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
35 30 0:31 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
HYBRID_OWN = "8:pids:/\n4:memory:/jobs/one\n1:cpu,cpuacct:/\n0::/\n"
SYSTEMD_MOUNTS = "35 25 0:30 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
SYSTEMD_OWN = "0::/user.slice/user-1000.slice/session-2.scope\n"
DOCKER_V1_MOUNTS = "600 590 0:30 /docker/abc /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory\n"
DOCKER_V1_OWN = "5:memory:/docker/abc/inner\n"


def found(mounts: str, own: str) -> list[tuple[int, set[str], str, str]]:
    return [
        (each.version, set(each.controllers), str(each.top), str(each.own))
        for each in limits.hierarchies(mounts, own)
    ]


def test_a_hybrid_machine_has_its_controllers_in_version_1():
    assert found(HYBRID_MOUNTS, HYBRID_OWN) == [
        (1, {"cpu"}, "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/cpu,cpuacct"),
        (1, {"memory"}, "/sys/fs/cgroup/memory", "/sys/fs/cgroup/memory/jobs/one"),
        (1, {"pids"}, "/sys/fs/cgroup/pids", "/sys/fs/cgroup/pids"),
        (2, set(), "/sys/fs/cgroup/unified", "/sys/fs/cgroup/unified"),
    ]


def test_children_may_be_made_in_the_own_cgroup_or_above_but_not_above_the_mount():
    (hierarchy,) = limits.hierarchies(SYSTEMD_MOUNTS, SYSTEMD_OWN)
    assert [str(path) for path in hierarchy.candidates()] == [
        "/sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope",
        "/sys/fs/cgroup/user.slice/user-1000.slice",
        "/sys/fs/cgroup/user.slice",
        "/sys/fs/cgroup",
    ]


def test_a_container_sees_a_part_of_the_hierarchy_as_its_top():
    assert found(DOCKER_V1_MOUNTS, DOCKER_V1_OWN) == [
        (1, {"memory"}, "/sys/fs/cgroup/memory", "/sys/fs/cgroup/memory/inner")
    ]


def test_a_machine_without_cgroups_has_none():
    assert found("20 1 8:1 / / rw - ext4 /dev/sda1 rw\n", "") == []


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("memory", 1, {"memory.limit_in_bytes": "67108864", "memory.memsw.limit_in_bytes": "67108864"}),
        ("memory", 2, {"memory.max": "67108864", "memory.swap.max": "0"}),
        ("pids", 1, {"pids.max": "7"}),
        ("cpu", 1, {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"}),
        ("cpu", 2, {"cpu.max": "50000 100000"}),
    ],
)
def test_what_is_written_into_a_cgroup(name, version, expected):
    assert limits.settings(name, version, Limits(memory_mb=64, processes=7, cpus=0.5)) == expected


def test_rlimits_stand_in_for_what_no_cgroup_limits():
    line = limits.ulimits(Limits(memory_mb=64, processes=7, disk_mb=3), {"pids"})
    script = f"{line}; ulimit -d; ulimit -f; ulimit -c; ulimit -Hd; ulimit -Hn"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["65536", "3072", "0", "65536", "4096"]
    assert "-u" not in line and "ulimit -u 7" in limits.ulimits(Limits(processes=7), set())


def test_a_stricter_rlimit_of_the_machine_stays():
    line = limits.ulimits(Limits(disk_mb=3), {"memory", "pids"})
    script = f"ulimit -f 100; {line}; ulimit -f; ulimit -Hf"
    user = 65534 if os.geteuid() == 0 else None
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, user=user)
    assert done.stdout.split() == ["100", "100"]


def test_owner_lives_only_with_its_own_start_time():
    pid, _, start = limits.owner().partition("-")
    assert limits.owner_lives(f"{pid}-{start}")
    assert not limits.owner_lives(f"{pid}-{int(start) + 1}")
    assert not limits.owner_lives("999999999-1") and not limits.owner_lives("") and not limits.owner_lives("x-1")


OWNER = textwrap.dedent("""
    import asyncio, sys, time
    from pathlib import Path
    from lightning_ray.sandbox.base import SandboxSpec
    from lightning_ray.sandbox.bubblewrap import Bubblewrap

    async def main():
        sandbox = Bubblewrap(SandboxSpec("orphan", Path(sys.argv[1])))
        await sandbox.start()
        await sandbox.exec("setsid sleep 1000 >/dev/null 2>&1 &", timeout_s=5)
        print(sandbox.pid, flush=True)
        time.sleep(1000)

    asyncio.run(main())
""")


def test_nothing_stays_behind_when_the_owner_is_killed(tmp_path):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    inside = int(owner.stdout.readline())
    assert Path(f"/proc/{inside}").exists()
    name = f"{owner.pid}-{limits._start_time(owner.pid)}"
    groups = [group for _, parent in limits.places().values() for group in parent.glob(f"{limits.PREFIX}{name}.*")]
    assert len(groups) == len(limits.places())
    assert not [line for line in limits.janitor() if name in line]  # its owner lives: nothing of it is touched
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    for _ in range(500):
        if not Path(f"/proc/{inside}").exists():
            break
        os.sched_yield()
        subprocess.run(["sleep", "0.01"], check=True)
    assert not Path(f"/proc/{inside}").exists()
    limits.janitor()  # or that of another run on this machine, a moment before
    assert not any(group.exists() for group in groups)
    assert not [line for line in limits.janitor() if name in line]


def test_the_janitor_removes_directories_of_dead_owners_only(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, alive = tmp_path / "lightning_ray.999999999-1.a", tmp_path / f"lightning_ray.{limits.owner()}.a"
    dead.mkdir()
    alive.mkdir()
    assert f"directory {dead}" in limits.janitor()
    assert not dead.exists() and alive.exists()
