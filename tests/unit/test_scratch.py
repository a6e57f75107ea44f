"""scratch.py: directories of dead processes are removed, those of living ones are not."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lightning_ray.scratch import Scratch, sweep


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_living_one_stays_and_a_removed_one_is_gone(tmp_path):
    scratch = Scratch()
    (scratch.path / "file").write_text("x")
    assert sweep() == []
    assert (scratch.path / "file").exists()
    scratch.remove()
    scratch.remove()
    assert list(tmp_path.iterdir()) == []


def test_other_users_may_look_but_not_write():
    scratch = Scratch()
    assert oct(scratch.path.stat().st_mode & 0o777) == "0o755"
    scratch.remove()
    hidden = Scratch(private=True)
    assert oct(hidden.path.stat().st_mode & 0o777) == "0o700"
    hidden.remove()


def test_law8_nothing_of_a_killed_process_stays_behind(tmp_path):
    code = ("import time; from lightning_ray.scratch import Scratch; scratch = Scratch();"
            "(scratch.path / 'workspaces').mkdir(); print(scratch.path, flush=True); time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE,
                          text=True) as process:
        path = Path(process.stdout.readline().strip())
        assert sweep() == [] and path.exists()
        os.kill(process.pid, signal.SIGKILL)
    assert sweep() == [path]
    assert list(tmp_path.iterdir()) == []
