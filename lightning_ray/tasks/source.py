"""Where tasks come from: generated ones, or files in SWE-smith's schema."""

from pathlib import Path

from lightning_ray.config import ConfigError, TasksConfig
from lightning_ray.tasks import files, one_line_bugs
from lightning_ray.tasks.base import TaskSplits


def load_tasks(config: TasksConfig) -> TaskSplits:
    """Training and held-out tasks. Raises `ConfigError` for an unknown source, a malformed line, or splits that share
    an instance."""
    if config.source == "one_line_bugs":
        if config.heldout_source is not None:
            raise ConfigError(f"tasks.heldout_source: {config.heldout_source} goes with a file in tasks.source, not "
                              "with one_line_bugs, which generates its own. Leave it out")
        return one_line_bugs.generate(config)
    path = Path(config.source).expanduser()
    if not path.is_file():
        raise ConfigError(f"tasks.source: {config.source!r} is neither a generated source (one_line_bugs) nor a file. "
                          "Give a JSONL or Parquet file of tasks")
    train = files.load(path)[: config.train]
    if config.heldout_source is not None and not config.heldout_source.expanduser().is_file():
        raise ConfigError(f"tasks.heldout_source: there is no file {config.heldout_source}. Give a JSONL or Parquet "
                          "file of tasks, or leave it out")
    heldout = files.load(config.heldout_source.expanduser())[: config.heldout] if config.heldout_source else []
    shared = {task.instance_id for task in train} & {task.instance_id for task in heldout}
    if shared:
        raise ConfigError(f"tasks.heldout_source: {config.heldout_source} shares {len(shared)} instances with "
                          f"tasks.source, the first is {min(shared)!r}. Held-out tasks must not be trained on")
    if not any(task.weight for task in train):
        raise ConfigError(f"tasks.source: {config.source} holds no task (of a weight above 0). Give a file with at "
                          "least one")
    return TaskSplits(train=train, heldout=heldout)
