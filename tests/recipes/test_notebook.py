"""jobs/notebook.ipynb, whole and unchanged but for its first cell, on a Ray that runs already."""

import re
from pathlib import Path

import nbclient
import nbformat
import pytest
import ray

from lightning_ray.run_directory import RunDirectory
from lightning_ray.trajectory.archive import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NOTEBOOK = Path(__file__).parents[2] / "jobs" / "notebook.ipynb"


@pytest.fixture
def address():
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False,
             logging_level="ERROR")
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def executed(overrides):
    """The notebook's cells after they ran, by id."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    parameters = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    parameters.source = f"OVERRIDES = {overrides!r}"
    nbclient.NotebookClient(notebook, timeout=800, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    return {cell.id: cell for cell in notebook.cells}


def shown(cell, kind):
    """What the cell displays, in order; its own value is the last."""
    return [output.data[kind] for output in cell.outputs if kind in output.get("data", {})]


def printed(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream").splitlines()


def test_every_cell_runs_and_shows_what_it_says(address, tmp_path):
    settings = {"run.dir": tmp_path, "run.name": "small", "ray.address": address, "tasks.train": 64, "tasks.heldout": 8,
                "evaluation.tasks": 8, "policy.warm_start.steps": 60, "schedule.groups_per_step": 2,
                "schedule.groups_in_flight": 2, "schedule.group_size": 4, "runners.rollouts": 8}
    cells = executed([word for name, value in settings.items() for word in (f"--{name}", str(value))])
    run = RunDirectory.existing(tmp_path / "small")
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == [1, 2, 3, 4], "three steps, and one after the stop"
    assert f"'tokens_sampled': {metrics[0]['tokens_sampled']}" in shown(cells["cell-04"], "text/plain")[-1]
    assert [line.split()[0] for line in printed(cells["cell-05"])] == ["2", "3"]

    rollout = read_rollouts(run.root / "rollouts" / "step_000003.parquet")[0]
    [page] = shown(cells["cell-07"], "text/html")
    [plain] = shown(cells["cell-08"], "text/html")
    for html in (page, plain):
        assert rollout.rollout_id in html and html.count("<b>user</b>") >= 1
        tokens = re.findall(r'title="token \d+, log-prob -?[\d.]+, version \d+, ((?:not )?trained)', html)
        assert len(tokens) == rollout.tokens_sampled
    [so_far] = shown(cells["cell-10"], "text/html")
    assert "run small: 3 steps" in so_far and 'src="data:image/png;base64,' in so_far
    assert any("run small: 4 steps" in html for html in shown(cells["cell-14"], "text/html"))
    assert shown(cells["cell-14"], "text/plain")[-1] == "4"
