"""A trainer in somebody's script."""

import subprocess
import sys

import pytest

from lightning_ray import Config, Trainer
from lightning_ray.observe.progress import LineProgress
from lightning_ray.trainer import RunFailed

LEFT = """
import atexit
from lightning_ray import Config, Trainer
atexit.register(print, "Ray ends")  # as Ray itself does when it is imported

class Watched(Trainer):
    def _run(self):
        try:
            while True:
                yield "a step"
        finally:
            print("parts end")

for step in Watched(Config()).steps():
    print(step)
    break
print("the script ends")
"""


def test_a_script_that_leaves_the_loop_leaves_nothing_running():
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["a step", "the script ends", "parts end", "Ray ends"], done.stderr


def test_a_part_that_cannot_be_stopped_keeps_no_other_running(capsys):
    class Part:
        def __init__(self, fault=None):
            self.fault, self.stopped = fault, False

        def stop(self):
            self.stopped = True
            if self.fault:
                raise self.fault

    trainer = Trainer(Config(), progress=LineProgress())
    parts = {"fleet": Part(RuntimeError("its actor died\nat once")), "policy": Part(KeyboardInterrupt()), "ray": Part(),
             "memory": Part()}
    trainer.__dict__.update(parts)
    trainer._close()
    assert all(part.stopped for part in parts.values())
    assert "fleet did not end as it should: RuntimeError: its actor died\n" in capsys.readouterr().out


def test_a_disk_that_is_full_is_named():
    class Full(Trainer):
        def _prepare(self):
            raise OSError(28, "Error writing bytes to file")

    with pytest.raises(RunFailed, match=r"run\.dir: runs is full"):
        next(Full(Config()).steps())
