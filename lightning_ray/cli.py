"""The command line: `lightning-ray train | view`.

Exit status: 0 when done, 2 for bad input, 1 for a failed run, 130 when interrupted.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_ray.config import Config, ConfigError

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "PYTHONWARNINGS": "ignore", "DS_ACCELERATOR_QUIET": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_LOG_TO_DRIVER": "0",
}
"""Libraries log to files or not at all: the display belongs to the run. Values that the user has set stay."""


def main(arguments: Sequence[str] | None = None) -> int:
    options, overrides = _parser().parse_known_args(arguments)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        return options.run(options, overrides)
    except ConfigError as error:
        print(f"lightning-ray: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("lightning-ray: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ray", description=(__doc__ or "").split("\n")[0],
        epilog="Any setting of the file can be given as --part.field VALUE.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy behind a harness")
    train.add_argument("config", nargs="?", type=Path, help="YAML file (with --resume: the one in the run directory)")
    train.add_argument("--resume", type=Path, metavar="RUN", help="go on from the last checkpoint of a run")
    train.set_defaults(run=_train)

    view = commands.add_parser("view", help="read the rollouts of a run as conversations")
    view.add_argument("path", type=Path, help="a run directory or a Parquet file of rollouts")
    view.add_argument("--rollout", metavar="ID", help="show this one whole")
    view.add_argument("--step", type=int, help="list the rollouts of this step (default: the last)")
    view.set_defaults(run=_view)
    return parser


def _train(options: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    from lightning_ray.observe.progress import LineProgress, LiveProgress

    if options.config is None and options.resume is None:
        raise ConfigError("train: no configuration was given. Name a YAML file, as jobs/quickstart.yaml")
    config = Config.load(options.config or options.resume / "config.yaml", overrides)

    from lightning_ray.trainer import RunFailed, Trainer

    console = Console(highlight=False, soft_wrap=True)
    progress = LiveProgress(config.run.steps, console) if console.is_terminal else LineProgress(console)
    trainer = Trainer(config, resume=options.resume, progress=progress)
    try:
        for _ in trainer.steps():
            pass
    except KeyboardInterrupt:
        _say_how_to_go_on(trainer)
        raise
    except RunFailed as error:
        print(f"lightning-ray: the run failed: {error}", file=sys.stderr)
        _say_how_to_go_on(trainer)
        return FAILED
    finally:
        progress.close()
    return DONE


def _say_how_to_go_on(trainer) -> None:
    if trainer.run is not None and trainer.run.complete_checkpoints():
        print(f"lightning-ray: go on with: lightning-ray train --resume {trainer.run.root}", file=sys.stderr)


def _view(options: argparse.Namespace, overrides: list[str]) -> int:
    from lightning_ray.observe.viewer import view

    if overrides:
        raise ConfigError(f"view: {overrides[0]!r} is not understood. See lightning-ray view --help")
    return view(options.path, step=options.step, rollout_id=options.rollout)


if __name__ == "__main__":
    sys.exit(main())
