"""What every local sandbox does, bubblewrap or container: commands, files, patches, limits of output and time."""

import asyncio
import os
import stat
import subprocess
import time
from pathlib import Path

import pytest

from lightning_ray.sandbox.base import (
    WORKSPACE,
    Limits,
    Mount,
    SandboxDied,
    SandboxError,
)
from lightning_ray.sandbox.network import listen_inside
from lightning_ray.tasks.workspaces import Workspaces
from tests.sandboxes import EVERY_WORKSPACE, FILES, make_task


@pytest.fixture
def workspace(tmp_path) -> Path:
    return Workspaces(tmp_path / "workspaces").prepare(make_task())


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_a_command_runs_in_the_workspace_with_both_outputs_merged(running, workspace):
    async with running(workspace) as sandbox:
        done = await sandbox.exec("pwd; echo err >&2; echo 'a  b'; cat README.md; exit 7", timeout_s=10)
    assert done.output == f"{WORKSPACE}\nerr\na  b\nA shop.\n"
    assert (done.returncode, done.timed_out, done.truncated) == (7, False, False)


COMMANDS = [
    ("printf '%s' 'it'\\''s $HOME `id`'", "it's $HOME `id`", 0),
    ("cat <<'X'\ntwo\nlines\nX\n", "two\nlines\n", 0),
    ("no-such-command-here", "bash: line 1: no-such-command-here: command not found\n", 127),
    ("if", None, 2),
    ("kill -9 $$", "", 137),
    ("set -o pipefail; false | true", "", 1),
    ("exec 3>&- 5>&-; echo ok", "ok\n", 0),
    ("cat", "", 0),
    ("printf 'h\\303\\251\\377'", "hé�", 0),
    ("echo a\0b", "ab\n", 0),
    ("# only a comment", "", 0),
    ("true &", "", 0),
    ("trap 'echo bye' EXIT; exit 3", "bye\n", 3),
]


async def test_commands_arrive_as_written(running, workspace):
    async with running(workspace) as sandbox:
        for command, output, returncode in COMMANDS:
            done = await sandbox.exec(command, timeout_s=10)
            assert done.returncode == returncode, command
            assert output is None or done.output == output, command


async def test_each_command_is_a_shell_of_its_own_but_files_stay(running, workspace):
    async with running(workspace) as sandbox:
        await sandbox.exec("cd /tmp; X=1; export Y=2; echo kept > kept; set -e", timeout_s=10)
        done = await sandbox.exec("pwd; echo $X$Y; cat /tmp/kept", timeout_s=10)
    assert done.output == f"{WORKSPACE}\n\nkept\n"


async def test_environment_of_the_sandbox_and_of_one_command(running, workspace):
    async with running(workspace, env={"ALWAYS": "a b"}) as sandbox:
        done = await sandbox.exec("echo $ALWAYS $ONCE", timeout_s=10, env={"ONCE": "it's $HOME"})
        assert done.output == "a b it's $HOME\n"
        assert (await sandbox.exec("echo $ALWAYS $ONCE", timeout_s=10)).output == "a b\n"
        with pytest.raises(ValueError, match="not a name"):
            await sandbox.exec("true", timeout_s=10, env={"A; touch /tmp/x #": ""})


async def test_stdin_arrives_whole_and_what_is_not_read_does_not_reach_the_next_command(running, workspace):
    data = bytes(range(256)) * 4000
    async with running(workspace) as sandbox:
        assert (await sandbox.exec("wc -c", timeout_s=10, stdin=data)).output.strip() == str(len(data))
        done = await sandbox.exec("head -c 3 | od -An -tx1", timeout_s=10, stdin=data)
        assert done.output.split() == ["00", "01", "02"]
        assert (await sandbox.exec("true", timeout_s=10, stdin=data)).returncode == 0
        assert (await sandbox.exec("cat", timeout_s=10)).output == ""
        assert (await sandbox.exec("cat", timeout_s=10, stdin=b"next")).output == "next"


async def test_commands_longer_than_one_argument_may_be(running, workspace):
    text = "x" * 300_000
    async with running(workspace) as sandbox:
        done = await sandbox.exec(f"echo {text} | wc -c; echo $A; cat", timeout_s=20, env={"A": "1"})
        assert done.output == "300001\n1\n"
        done = await sandbox.exec(f": {text}; cat; exit 4", timeout_s=20, stdin=b"in")
        assert (done.output, done.returncode) == ("in", 4)


async def test_output_beyond_the_cap_is_thrown_away(running, workspace):
    async with running(workspace, limits=Limits(output_bytes=1000)) as sandbox:
        done = await sandbox.exec("seq 1 100000; exit 5", timeout_s=20)
        assert (len(done.output), done.truncated, done.returncode) == (1000, True, 5)
        assert done.output.startswith("1\n2\n3\n")
        done = await sandbox.exec("printf '%01000d' 7", timeout_s=20)
        assert (len(done.output), done.truncated) == (1000, False)


async def test_endless_output_ends_at_the_timeout_and_leaves_the_event_loop_free(running, workspace):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async with running(workspace) as sandbox:
        ticking = asyncio.create_task(tick())
        done = await sandbox.exec("yes", timeout_s=1)
        ticking.cancel()
        assert done.timed_out and done.truncated and len(done.output) == Limits().output_bytes
        assert ticks > 20
        assert (await sandbox.exec("echo still here", timeout_s=10)).output == "still here\n"


async def test_a_timeout_kills_what_the_command_started_and_keeps_what_it_printed(running, workspace):
    async with running(workspace) as sandbox:
        started = time.monotonic()
        done = await sandbox.exec("echo before; (setsid sleep 999 &) ; sleep 998 & sleep 997", timeout_s=0.5)
        assert done.timed_out and done.output == "before\n" and done.returncode == 137
        assert time.monotonic() - started < 5
        assert (await sandbox.exec("pgrep sleep", timeout_s=10)).output == ""


async def test_a_timeout_spares_daemons_of_earlier_commands(running, workspace):
    async with running(workspace) as sandbox:
        await sandbox.exec("sleep 900 >/dev/null 2>&1 &", timeout_s=10)
        assert (await sandbox.exec("sleep 901", timeout_s=0.3)).timed_out
        assert (await sandbox.exec("pgrep -a sleep", timeout_s=10)).output.endswith("sleep 900\n")


async def test_a_timeout_while_stdin_is_still_being_sent(running, workspace):
    async with running(workspace) as sandbox:
        done = await sandbox.exec("sleep 99", timeout_s=0.3, stdin=b"x" * 1_000_000)
        assert done.timed_out
        assert (await sandbox.exec("cat", timeout_s=10, stdin=b"next")).output == "next"


async def test_a_cancelled_command_ends_the_sandbox(running, workspace):
    async with running(workspace) as sandbox:
        command = asyncio.create_task(sandbox.exec("sleep 99", timeout_s=60))
        await asyncio.sleep(0.1)
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
        with pytest.raises(SandboxDied):
            await sandbox.exec("true", timeout_s=10)


async def test_a_sandbox_that_was_killed_says_so(running, workspace):
    async with running(workspace) as sandbox:
        command = asyncio.create_task(sandbox.exec("sleep 99", timeout_s=60))
        await asyncio.sleep(0.1)
        os.kill(sandbox.pid, 9)
        with pytest.raises(SandboxDied):
            await command
        with pytest.raises(SandboxDied):
            await sandbox.exec("true", timeout_s=10)


async def test_a_command_that_runs_while_the_sandbox_stops_ends_with_it(running, workspace):
    """Even where the event loop is held up: descriptors that it waits for must not be closed and used again."""
    async with running(workspace) as sandbox:
        command = asyncio.create_task(sandbox.exec("sleep 60; cat", timeout_s=30, stdin=b"x" * 300_000))
        await asyncio.sleep(0.1)
        stopping = asyncio.create_task(sandbox.stop())
        await asyncio.sleep(0)
        time.sleep(0.5)
        with pytest.raises(SandboxDied):
            async with asyncio.timeout(10):
                await command
        await asyncio.gather(stopping, sandbox.stop())


@EVERY_WORKSPACE
async def test_put_and_get(running, workspace):
    data = bytes(range(256)) * 1000
    async with running(workspace) as sandbox:
        await sandbox.put({"deep/er/data.bin": data, "README.md": b"changed\n"})
        assert await sandbox.get("deep/er/data.bin") == data
        assert await sandbox.get("README.md") == b"changed\n"
        assert (await sandbox.get("/etc/hostname")).strip() == b"sandbox"
        for missing in ("nothing", "deep", "-x; id"):
            with pytest.raises(FileNotFoundError):
                await sandbox.get(missing)
        for bad in ("/etc/passwd", "../x", "a/../../x"):
            with pytest.raises(ValueError, match="below the workspace"):
                await sandbox.put({bad: b""})


@EVERY_WORKSPACE
async def test_put_says_where_files_do_not_fit(running, workspace):
    async with running(workspace, limits=Limits(disk_mb=1)) as sandbox:
        with pytest.raises(SandboxError, match="could not be written"):
            await sandbox.put({"big": b"x" * 3_000_000})


@EVERY_WORKSPACE
async def test_diff_has_every_kind_of_change_and_applies(running, workspace, tmp_path):
    script = r"""
        sed -i 's/-/+/' shop.py; rm README.md; chmod +x tools/run.sh; mkdir new; printf 'no newline' > 'new/a b.txt'
        printf '\000\001\377binary' > new/blob; echo é > 'né"w'; : > empty; ln -s /etc/passwd link
    """
    async with running(workspace) as sandbox:
        assert await sandbox.diff() == ""
        await sandbox.exec(script, timeout_s=10)
        patch = await sandbox.diff()
        assert await sandbox.diff() == patch
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(workspace), str(clone)], check=True)
    subprocess.run(["git", "apply"], input=patch.encode(), cwd=clone, check=True)
    assert (clone / "shop.py").read_text() == FILES["shop.py"].replace("-", "+")
    assert not (clone / "README.md").exists()
    assert (clone / "tools/run.sh").stat().st_mode & stat.S_IXUSR
    assert (clone / "new/a b.txt").read_text() == "no newline"
    assert (clone / "new/blob").read_bytes() == b"\0\1\xffbinary"
    assert (clone / 'né"w').read_text() == "é\n" and (clone / "empty").read_bytes() == b""
    assert os.readlink(clone / "link") == "/etc/passwd"


@EVERY_WORKSPACE
async def test_the_workspace_is_copied_on_write_and_git_works_inside(running, workspace):
    script = "git status --porcelain; git log --format=%an.%s.%ad --date=iso; git remote; git stash list; whoami"
    async with running(workspace) as sandbox:
        done = await sandbox.exec(script, timeout_s=10)
        assert done.output == "workspace.workspace.2020-01-01 00:00:00 +0000\nagent\n"
        done = await sandbox.exec("echo x > shop.py; git commit -qam mine; git log --oneline | wc -l", timeout_s=10)
        assert done.output == "2\n"
    assert (workspace / "shop.py").read_text() == FILES["shop.py"]


async def test_mounts_are_read_only_and_reach_what_the_sandboxs_user_cannot(running, workspace, tmp_path):
    private = tmp_path / "private"
    (private / "tool").mkdir(parents=True)
    (private / "tool/run").write_text("echo tool\n")
    (private / "one.txt").write_text("one file\n")
    private.chmod(0o700)
    mounts = (Mount(private / "tool", "/opt/tool"), Mount(private / "one.txt", "/opt/one.txt"))
    async with running(workspace, mounts=mounts) as sandbox:
        done = await sandbox.exec("bash /opt/tool/run; cat /opt/one.txt; touch /opt/tool/x", timeout_s=10)
    assert done.output.startswith("tool\none file\n") and "Read-only file system" in done.output
    assert str(tmp_path) not in done.output


async def test_a_workspace_larger_than_the_disk_is_refused(running, tmp_path):
    (tmp_path / "w").mkdir()
    (tmp_path / "w/big").write_bytes(b"x" * 3_000_000)
    with pytest.raises(SandboxError, match="does not fit"):
        async with running(tmp_path / "w", limits=Limits(disk_mb=1)):
            pass


async def test_a_listener_in_its_network_is_reachable_and_only_from_there(running, workspace):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nhello")
        await writer.drain()
        writer.close()

    get = "python3 -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/').read().decode())\""
    async with running(workspace) as sandbox, running(workspace) as other:
        listener = await asyncio.to_thread(listen_inside, sandbox.pid, 8080)
        async with await asyncio.start_server(answer, sock=listener):
            assert (await sandbox.exec(get, timeout_s=10)).output == "hello\n"
            assert "refused" in (await other.exec(get, timeout_s=10)).output.lower()
            with pytest.raises(OSError):
                await asyncio.to_thread(listen_inside, sandbox.pid, 8080)


async def test_two_sandboxes_never_share_a_user_id(running, workspace):
    async with running(workspace) as one, running(workspace) as two:
        ids = {sandbox.user for sandbox in (one, two)}
        if os.geteuid() == 0:
            assert len(ids) == 2 and 0 not in ids
        else:
            assert ids == {os.geteuid()}


