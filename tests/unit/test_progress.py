"""The lines of a log."""

import io

from rich.console import Console

from lightning_ray.observe.progress import LineProgress


def lines(tell, every_s=30.0):
    shown = io.StringIO()
    progress = LineProgress(Console(file=shown, soft_wrap=True))
    progress.EVERY_S = every_s
    tell(progress)
    return shown.getvalue().splitlines()


def test_what_is_told_is_text_and_no_markup():
    assert lines(lambda log: log.note("rollout failed: [/testbed] [Errno 2] [red]")) == [
        "! rollout failed: [/testbed] [Errno 2] [red]"]


def test_long_work_is_heard_of_now_and_then():
    def work(log):
        log.phase("warming up the policy")
        log.warm_up(4, 300, 2.5)
        log.rollouts(3, 64)

    assert lines(work) == ["· warming up the policy"]
    assert lines(work, every_s=0) == [
        "· warming up the policy", "  4 of 300 steps of the warm-up, supervised loss 2.500", "  3 of 64 rollouts"]
