"""A trainer in somebody's script."""

import subprocess
import sys

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
