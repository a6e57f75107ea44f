"""Workspaces that are overlaid and not copied: what users see (the rest is in `test_sandbox_protocol.py`), what stays,
and what happens where the kernel refuses.
"""

import os
from pathlib import Path

import pytest

from lightning_ray.config import SandboxConfig
from lightning_ray.sandbox import backend, overlay, staging
from lightning_ray.sandbox.base import SandboxSpec
from lightning_ray.sandbox.bubblewrap import Bubblewrap
from lightning_ray.tasks.workspaces import Workspaces
from tests.sandboxes import make_task, running

LOOK = "grep -c ' /testbed .* overlay ' /proc/self/mountinfo; stat -c '%u %n' . shop.py .git; cat shop.py"


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(overlay, "LARGE_BYTES", 1)
    return Workspaces(tmp_path).prepare(make_task())


@pytest.fixture
def possible():
    if overlay.refusal():
        pytest.skip(f"no overlay: {overlay.refusal()}")


def mounts() -> list[str]:
    """Mounts of layers that any thread of this process sees."""
    tables = [path.read_text() for path in Path("/proc/self/task").glob("*/mountinfo")]
    return [line for table in tables for line in table.splitlines() if f" {staging.PLACE}/" in line and (
        "/lower " in line or "/changes " in line)]


async def test_the_users_own_files_on_an_overlay_and_no_mount_stays(possible, workspace):
    async with running(workspace) as sandbox:
        done = await sandbox.exec(LOOK, timeout_s=10)
        assert done.output.startswith("1\n1000 .\n1000 shop.py\n1000 .git\ndef total")
        assert mounts() == []
        done = await sandbox.exec("chmod 700 shop.py . && mv tools t && rm -r t .git && touch -d 2001-01-01 . && ls -A",
                                  timeout_s=10)
        assert done.output == "README.md\nshop.py\n"
    assert (workspace / ".git").is_dir() and (workspace / "shop.py").stat().st_mode & 0o777 == 0o644
    assert os.stat(workspace / "shop.py").st_uid == 0


async def test_a_kernel_that_refuses_means_a_copy_and_the_report_says_so(workspace, monkeypatch):
    monkeypatch.setattr(overlay, "refusal", lambda: "mount_setattr: not implemented")
    report = backend.choose(SandboxConfig()).report
    assert report["large_workspaces"] == "copied: mount_setattr: not implemented"
    async with running(workspace) as sandbox:
        assert (await sandbox.exec(LOOK, timeout_s=10)).output.startswith("0\n1000 .\n1000 shop.py\n")


async def test_layers_that_cannot_be_made_leave_nothing(possible, workspace, monkeypatch):
    def broken(*arguments):
        raise OSError("no such layer")

    monkeypatch.setattr(overlay.os, "chown", broken)
    with pytest.raises(Exception, match="no such layer"):
        await Bubblewrap(SandboxSpec("x", workspace)).start()
    assert mounts() == []


def test_what_is_not_prepared_or_small_is_copied(tmp_path):
    (tmp_path / "checkout").mkdir()
    assert not overlay.is_large(tmp_path / "checkout")
    (tmp_path / "checkout.tar").write_bytes(b"x")
    assert not overlay.is_large(tmp_path / "checkout")
    os.truncate(tmp_path / "checkout.tar", overlay.LARGE_BYTES)
    assert overlay.is_large(tmp_path / "checkout")
