"""The bubblewrap sandbox as its users see it: commands, files, patches, limits of output and time, its end."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_ray.sandbox import limits, shell
from lightning_ray.sandbox.base import (
    Limits,
    Mount,
    PatchUnavailable,
    SandboxDied,
    SandboxError,
    SandboxSpec,
)
from lightning_ray.sandbox.bubblewrap import Bubblewrap
from lightning_ray.tasks.workspaces import Workspaces
from tests.sandboxes import make_task, running


@pytest.fixture
def workspace(tmp_path) -> Path:
    return Workspaces(tmp_path / "workspaces").prepare(make_task())


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_a_daemon_talks_into_nobodys_output_between_commands(workspace):
    async with running(workspace) as sandbox:
        await sandbox.exec("(sleep 0.2; echo from the daemon) &", timeout_s=10)
        await asyncio.sleep(0.6)
        assert (await sandbox.exec("echo clean", timeout_s=10)).output == "clean\n"


async def test_commands_of_concurrent_callers_run_one_after_the_other(workspace):
    async with running(workspace) as sandbox:
        done = await asyncio.gather(*[sandbox.exec(f"echo {i}; sleep 0.01; echo {i}", timeout_s=20) for i in range(8)])
    assert [each.output for each in done] == [f"{i}\n{i}\n" for i in range(8)]


@pytest.mark.parametrize(
    "tampering",
    [
        "git add -A; git commit -qm mine",
        "rm -rf .git",
        "git config diff.external /bin/false; git config core.worktree /tmp; echo '* -diff' > .git/info/attributes",
        "git update-index --assume-unchanged shop.py; echo '*' > .git/info/exclude",
        "mkdir -p .git/hooks; echo 'exit 1' > .git/hooks/pre-commit; chmod +x .git/hooks/*",
        "git checkout -q -b other; git commit -qam mine; git gc -q --prune=now",
        "rm -rf /tmp/* /run/*; git config --global diff.noprefix true; git config --global diff.external /bin/false",
    ],
)
async def test_diff_does_not_depend_on_the_repository_inside(workspace, tampering):
    async with running(workspace) as sandbox:
        await sandbox.exec(f"sed -i 's/-/+/' shop.py; {tampering}", timeout_s=10)
        patch = await sandbox.diff()
    assert patch.startswith("diff --git a/shop.py b/shop.py\n")
    assert patch.count("diff --git") == 1 and "+    return a + b" in patch


async def test_a_workspace_without_a_repository_is_no_fault_of_the_rollout(tmp_path):
    (tmp_path / "bare").mkdir()
    async with running(tmp_path / "bare") as sandbox:
        with pytest.raises(SandboxError, match=r"repository cannot be read.*\.git") as found:
            await sandbox.diff()
    assert found.value.blame == "sandbox"


async def test_diff_works_when_tmp_is_full(workspace):
    async with running(workspace, limits=Limits(disk_mb=2)) as sandbox:
        await sandbox.exec("sed -i 's/-/+/' shop.py; head -c 9M /dev/zero > /tmp/full", timeout_s=10)
        assert "+    return a + b" in await sandbox.diff()


async def test_a_patch_that_is_too_large_is_the_rollouts_doing(workspace):
    async with running(workspace) as sandbox:
        await sandbox.exec("seq 1 2000000 > numbers", timeout_s=20)
        with pytest.raises(PatchUnavailable, match="larger than"):
            await sandbox.diff()


async def test_text_that_is_not_utf8_survives_the_diff(workspace, tmp_path):
    async with running(workspace) as sandbox:
        await sandbox.exec(r"printf 'caf\351\n' > latin1.txt", timeout_s=10)
        patch = await sandbox.diff()
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(workspace), str(clone)], check=True)
    subprocess.run(["git", "apply"], input=patch.encode("utf-8", "surrogateescape"), cwd=clone, check=True)
    assert (clone / "latin1.txt").read_bytes() == b"caf\xe9\n"


async def test_stop_is_idempotent_and_leaves_nothing(workspace):
    sandbox = Bubblewrap(SandboxSpec("stopped", workspace))
    await sandbox.start()
    await sandbox.exec("setsid sleep 500 >/dev/null 2>&1 & nohup sleep 501 >/dev/null 2>&1 &", timeout_s=10)
    inside = [int(pid) for pid in Path(f"/proc/{sandbox.pid}/task/{sandbox.pid}/children").read_text().split()]
    pids = [sandbox.pid, sandbox._running.outer.pid, *inside]
    groups = list(sandbox._running.group.directories)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert inside and all(map(alive, pids)) and len(groups) == len(limits.places())
    await sandbox.stop()
    await sandbox.stop()
    assert not any(map(alive, pids)) and not any(group.exists() for group in groups)
    assert len(os.listdir("/proc/self/fd")) < descriptors
    with pytest.raises(SandboxDied):
        await sandbox.exec("true", timeout_s=1)
    with pytest.raises(SandboxError):
        await sandbox.start()


async def test_no_file_descriptor_is_lost_over_many_sandboxes(workspace):
    async def once():
        async with running(workspace) as sandbox:
            await sandbox.exec("true", timeout_s=20)

    await once()
    before = len(os.listdir("/proc/self/fd"))
    await asyncio.gather(*[once() for _ in range(12)])
    assert len(os.listdir("/proc/self/fd")) == before


async def test_it_works_with_thousands_of_open_files(workspace):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 8192) if hard != resource.RLIM_INFINITY else 8192
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    held = []
    try:
        held += [os.open("/dev/null", os.O_RDONLY) for _ in range(min(wanted, 8192) - 200)]
        async with running(workspace) as sandbox:
            assert (await sandbox.exec("cat; ls /proc/self/fd | wc -l", timeout_s=20, stdin=b"in ")).output == "in 4\n"
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_start_that_is_cancelled_leaves_nothing(workspace):
    sandboxes = [Bubblewrap(SandboxSpec(f"cancelled-{i}", workspace)) for i in range(6)]
    starts = [asyncio.create_task(sandbox.start()) for sandbox in sandboxes]
    await asyncio.sleep(0.02)
    for start in starts:
        start.cancel()
    await asyncio.gather(*starts, return_exceptions=True)
    await asyncio.gather(*[sandbox.stop() for sandbox in sandboxes])
    for _ in range(200):
        left = [
            group for _, parent in limits.places().values()
            for group in parent.glob(f"{limits.PREFIX}{limits.owner()}.cancelled-*")
        ]  # fmt: skip
        if not left:
            break
        await asyncio.sleep(0.02)
    assert not left


async def test_a_missing_mount_or_workspace_is_named(workspace, tmp_path):
    with pytest.raises(SandboxError, match="no-such-mount"):
        await Bubblewrap(SandboxSpec("x", workspace, mounts=(Mount(tmp_path / "no-such-mount", "/opt/x"),))).start()
    with pytest.raises(SandboxError, match="no-such-workspace"):
        await Bubblewrap(SandboxSpec("x", tmp_path / "no-such-workspace")).start()
    with pytest.raises(SandboxError, match=r"cannot be started.*/usr/bin/x"):
        await Bubblewrap(SandboxSpec("x", workspace, mounts=(Mount(tmp_path, "/usr/bin/x/y"),))).start()


def test_it_dies_with_a_process_that_ends_normally(workspace):
    code = (
        "import asyncio, sys; from pathlib import Path\n"
        "from lightning_ray.sandbox.base import SandboxSpec\n"
        "from lightning_ray.sandbox.bubblewrap import Bubblewrap\n"
        "async def main():\n"
        "    sandbox = Bubblewrap(SandboxSpec('x', Path(sys.argv[1]))); await sandbox.start(); print(sandbox.pid)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(workspace)], capture_output=True, text=True, check=True)
    for _ in range(300):
        if not alive(int(done.stdout)):
            break
        time.sleep(0.01)
    assert not alive(int(done.stdout))
    limits.janitor()


async def test_commands_that_begin_at_once_begin_in_rounds_of_their_own_of_the_event_loop():
    rounds = 0

    async def count():
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1

    async def begin() -> int:
        await shell.turn()
        return rounds

    counting = asyncio.create_task(count())
    began = await asyncio.gather(*(begin() for _ in range(50)))
    counting.cancel()
    assert len(set(began)) == 50 and rounds >= 50
