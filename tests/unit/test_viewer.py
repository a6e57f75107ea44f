"""What a terminal shows of a run."""

import io

from rich.console import Console

from lightning_ray.observe.viewer import view
from lightning_ray.trajectory.archive import write_rollouts
from tests.unit.trajectories import make_call, make_trajectory


def test_on_a_narrow_terminal_a_rollout_has_its_whole_name_on_one_line(tmp_path):
    made = [make_trajectory([make_call(0, [1], [2])], rollout_id=f"g00000{n}-r7", group_id="g", reward=0.0)
            for n in range(3)]
    for each in made:
        each.task_id, each.reason = "[/owner]__repository.a_long_name_of_a_task", "tests_failed:\nwhich\n" * 9
    write_rollouts(tmp_path / "step_000001.parquet", made, max_tokens=9)
    shown = io.StringIO()
    view(tmp_path / "step_000001.parquet", console=Console(file=shown, width=80))
    *rows, hint = [line for line in shown.getvalue().splitlines() if "-r7" in line]
    assert [row.split()[0] for row in rows] == [each.rollout_id for each in made]
    assert hint.endswith("step_000001.parquet --rollout g000000-r7")
