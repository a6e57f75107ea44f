"""The check before a run: what counts as a fault, what the remedy is, and that missing isolation is an error."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ray import preflight
from lightning_ray.config import Config, ConfigError, SandboxConfig
from lightning_ray.sandbox import backend, probe, seccomp
from lightning_ray.sandbox.base import SandboxDied, SandboxError, SandboxSpec, SandboxUnavailable
from lightning_ray.sandbox.bubblewrap import Bubblewrap
from lightning_ray.sandbox.uids import Uids, mapped_range
from lightning_ray.sandbox.unconfined import Unconfined
from lightning_ray.tasks.workspaces import Workspaces
from tests.sandboxes import make_task

HOST = {name: f"{name}:[1]" for name in probe.NAMESPACES}
GOOD = "".join(f"namespace.{name} {name}:[2]\n" for name in probe.NAMESPACES) + (
    "NoNewPrivs: 1\nSeccomp: 2\nCapEff: 0000000000000000\ninterfaces lo \nenvironment HOME PATH PWD \n"
)
VARIABLES = {"HOME", "PATH", "PWD", "LANG"}


def test_a_good_probe_has_no_faults():
    assert probe.faults(GOOD, HOST, VARIABLES) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("net:[2]", "net:[1]"), "its net namespace is the host's"),
        (("namespace.pid pid:[2]\n", ""), "its pid namespace is unknown"),
        (("Seccomp: 2", "Seccomp: 0"), "no system call filter is active"),
        (("NoNewPrivs: 1", "NoNewPrivs: 0"), "it can gain privileges (NoNewPrivs)"),
        (("CapEff: 0000000000000000", "CapEff: 0000000000200000"), "it has capabilities (0000000000200000)"),
        (("interfaces lo", "interfaces eth0 lo"), "it has network interfaces: eth0 lo "),
        (("environment HOME", "environment AWS_SECRET HOME"), "it sees environment variables of the host: AWS_SECRET"),
        (("interfaces", "nested yes\ninterfaces"), "it can make user namespaces"),
        (("interfaces", "shell open\ninterfaces"), "it can reach into the shell that drives it"),
        (("interfaces", "writable /usr\ninterfaces"), "it can write to /usr"),
        (("interfaces", "missing.git yes\ninterfaces"),
         f"programs are missing inside: git ({probe.INSTALL})"),
    ],
)  # fmt: skip
def test_each_fault_is_named(change, fault):
    assert probe.faults(GOOD.replace(*change), HOST, VARIABLES) == [fault]


def test_running_as_root_outside_is_a_fault(monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("an ordinary user's sandbox cannot be root's")
    monkeypatch.setattr(Bubblewrap, "user", 0)
    with pytest.raises(SandboxUnavailable, match="it runs as root"):
        backend.choose(SandboxConfig())


def test_remedies_fit_the_machine():
    assert "sysctl user.max_user_namespaces" in backend.remedy({"user/max_user_namespaces": "0"})
    assert "unprivileged_userns_clone=1" in backend.remedy({"kernel/unprivileged_userns_clone": "0"})
    assert "AppArmor" in backend.remedy({"kernel/apparmor_restrict_unprivileged_userns": "1"})
    assert "--security-opt" in backend.remedy({"container": "yes"})
    assert "unshare -Urn" in backend.remedy({"user/max_user_namespaces": "1000", "container": "no"})


def test_this_machine_passes_and_the_report_says_how():
    chosen = backend.choose(SandboxConfig())
    assert isinstance(chosen.make(SandboxSpec("x", Path("/"))), Bubblewrap)
    assert chosen.report["backend"] == "bubblewrap" and chosen.report["system_calls"] == "seccomp"
    assert chosen.report["user"] == ("own uid" if os.geteuid() == 0 else "user namespace")
    assert set(chosen.report["limits"]) == {"memory", "pids", "cpu"} and "unsafe" not in chosen.report


async def test_choosing_works_inside_a_running_event_loop():
    assert backend.choose(SandboxConfig()).report["backend"] == "bubblewrap"


def test_a_cluster_that_nothing_is_known_of_is_an_error():
    with pytest.raises(SandboxUnavailable, match=r"sandbox\.kubernetes\.context: 'nowhere'"):
        backend.choose(SandboxConfig(backend="kubernetes", image="sandbox:1", kubernetes={"context": "nowhere"}))


NO_NAMESPACES = """
from lightning_ray import preflight
from lightning_ray.config import Config, ConfigError, SandboxConfig
from lightning_ray.sandbox import uids
from lightning_ray.sandbox.backend import choose
from lightning_ray.sandbox.base import SandboxUnavailable
uids.of_this_process = lambda: None  # as an ordinary user
try:
    choose(SandboxConfig())
except SandboxUnavailable as error:
    print("unavailable:", error)
chosen = choose(SandboxConfig(allow_unsafe=True))
print(chosen.make.__name__, chosen.report["backend"], len(chosen.report["unsafe"]))
"""


def test_without_namespaces_starting_is_an_error_that_names_the_remedy():
    """On a machine that allows none: inside a user namespace whose limit of further ones is 0."""
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", script, "sh", sys.executable, "-c", NO_NAMESPACES],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "unavailable: no sandbox can be started" in done.stdout, done.stderr
    assert "sysctl user.max_user_namespaces" in done.stdout
    assert done.stdout.endswith("Unconfined none 1\n")


def test_without_a_system_call_filter_only_the_unsafe_setting_goes_on(monkeypatch):
    def missing() -> bytes:
        raise SandboxUnavailable("the system call filter cannot be built: no libseccomp")

    monkeypatch.setattr(seccomp, "program", missing)
    with pytest.raises(SandboxUnavailable, match="libseccomp"):
        backend.choose(SandboxConfig())
    chosen = backend.choose(SandboxConfig(allow_unsafe=True))
    assert chosen.report["system_calls"] == "none"
    assert chosen.report["unsafe"] == ["the system call filter cannot be built: no libseccomp"]


async def test_unconfined_runs_commands_and_gives_patches(tmp_path):
    workspace = Workspaces(tmp_path).prepare(make_task())
    sandbox = Unconfined(SandboxSpec("x", workspace))
    await sandbox.start()
    try:
        done = await sandbox.exec("cat README.md; env | grep -c SECRET; ulimit -c; echo $HOME", timeout_s=10)
        assert done.output == "A shop.\n0\n0\n/tmp\n"
        assert (await sandbox.exec("sleep 60", timeout_s=0.3)).timed_out
        await sandbox.put({"shop.py": b"new\n"})
        assert await sandbox.get("shop.py") == b"new\n"
        assert "+new" in await sandbox.diff()
        with pytest.raises(SandboxError, match="no network namespace"):
            await sandbox.connect(None)
        directory = Path(sandbox._workspace).parent
        assert directory.exists()
        done = await sandbox.exec("(setsid sleep 777 >/dev/null 2>&1 & echo $!)", timeout_s=10)
        daemon = Path(f"/proc/{int(done.output)}")
        assert daemon.exists()
    finally:
        await sandbox.stop()
    await sandbox.stop()
    assert not directory.exists() and (workspace / "README.md").exists()
    for _ in range(100):
        try:
            if ") Z " in (daemon / "stat").read_text():  # ended; whoever is process 1 here may not reap it
                break
        except (FileNotFoundError, ProcessLookupError):
            break
        await asyncio.sleep(0.01)
    else:
        raise AssertionError("a daemon outlived its sandbox")
    with pytest.raises(SandboxDied):
        await sandbox.exec("true", timeout_s=1)


def test_user_ids_are_never_handed_out_twice_at_once(tmp_path):
    one, two = Uids(tmp_path, 10_000, 20_000), Uids(tmp_path, 10_000, 20_000)
    ids = [each.take() for each in (one, two) for _ in range(500)]
    assert len(set(ids)) == 1000 and all(10_000 <= uid < 20_000 for uid in ids)
    one.give_back(ids[0])
    assert one.take() not in ids  # an id comes around as late as possible
    for _ in range(2048 - 500):
        one.take()
    with pytest.raises(SandboxUnavailable, match="2048 sandboxes"):
        one.take()


def test_user_id_blocks_run_out_with_an_error(tmp_path):
    held = [Uids(tmp_path, 10_000, 10_000 + 2048 * 2) for _ in range(2)]
    with pytest.raises(SandboxUnavailable, match="claimed"):
        Uids(tmp_path, 10_000, 10_000 + 2048 * 2)
    assert len(held) == 2


@pytest.mark.parametrize(
    ("uid_map", "expected"),
    [
        ("         0          0 4294967295\n", (1_500_000_000, 1_900_000_000)),
        ("         0     100000      65536\n", (24_576, 57_344)),
        ("         0       1000          1\n", None),
        ("         0       1000          1\n         1     100000      65536\n", (24_576, 57_344)),
    ],
)
def test_user_ids_come_from_what_is_mapped(uid_map, expected):
    assert mapped_range(uid_map) == expected


def test_this_machine_is_asked_before_anything_starts_unless_the_runners_have_nodes_of_their_own(monkeypatch, tmp_path):
    def unavailable(config):
        raise SandboxUnavailable("no namespaces")

    monkeypatch.setattr(preflight, "check_sandbox", unavailable)
    config = Config(run={"dir": tmp_path})
    with pytest.raises(ConfigError, match=r"sandbox.backend: 'bubblewrap' cannot isolate here. no namespaces"):
        preflight.preflight(config, policy=False)
    elsewhere = config.model_copy(update={"runners": config.runners.model_copy(update={"resources": {"runner": 1}})})
    preflight.preflight(elsewhere, policy=False)
