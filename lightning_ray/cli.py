"""The command line: `lightning-ray train | evaluate | compare | capture | view | doctor`. The jobs share `run_command`.

Exit status: 0 when done, 2 for bad input, 1 for a failed run, 130 when interrupted.
"""

import argparse
import json
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_ray.config import Config, ConfigError

if TYPE_CHECKING:
    from lightning_ray.observe.progress import Progress

OVERRIDE = re.compile(r"--[A-Za-z_][\w-]*(\.[\w-]+)+(=|$)")
DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "PYTHONWARNINGS": "ignore",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1",
    "RAY_LOG_TO_DRIVER": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "^Task .* retries remaining",
}
"""Libraries log to files or not at all: the display belongs to the run. Values that the user has set stay."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    parser = _parser()
    parser.set_defaults(command=words[cut + 1:])
    return run_command(parser, words[:cut])


def run_command(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None,
                failures: tuple[type[Exception], ...] = ()) -> int:
    """Runs `run(options, overrides)`, a default of the parser, and says the exit status (`None` is done). Where another
    default, `settings`, is False there are no overrides. Bad input and `failures` are one line on stderr."""
    plain, overrides = separate_overrides(sys.argv[1:] if arguments is None else arguments)
    parser.set_defaults(settings=True)
    options, unknown = parser.parse_known_args(plain)
    overrides += unknown  # refused by name where settings are read
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    logging.getLogger("DeepSpeed").addFilter(_no_warning)
    for stop in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(stop) == signal.SIG_DFL:  # nohup and others may have said otherwise
            signal.signal(stop, signal.default_int_handler)
    try:
        if overrides and not options.settings:
            raise ConfigError(f"{overrides[0]!r} is not understood. See {parser.prog} --help")
        return options.run(options, overrides) or DONE
    except ConfigError as error:
        said = getattr(error, "cause", error)  # of an actor: Ray's own text is a traceback
        print(f"{parser.prog}: {said}", file=sys.stderr)
        return BAD_INPUT
    except PermissionError as error:
        if error.filename is None:
            raise
        print(f"{parser.prog}: {error.filename}: this user has not the rights for it. Give another path",
              file=sys.stderr)
        return BAD_INPUT
    except failures as error:
        print(f"{parser.prog}: failed: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _no_warning(record: logging.LogRecord) -> bool:
    """DeepSpeed warns a driver without GPU, which only imports it, that it takes the CPU."""
    return record.levelno > logging.WARNING


def separate_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and `--part.field VALUE` or `--part.field=VALUE` wherever they stand."""
    plain: list[str] = []
    overrides: list[str] = []
    rest = iter(words)
    for word in rest:
        if not OVERRIDE.match(word):
            plain.append(word)
            continue
        overrides.append(word)
        if "=" not in word:
            overrides += [value for value in [next(rest, None)] if value is not None]
    return plain, overrides


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ray", description=(__doc__ or "").split("\n")[0],
        epilog="Any setting of the file can be given as --part.field VALUE.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy behind a harness")
    train.add_argument("config", nargs="?", type=Path, help="YAML file (with --resume: the one in the run directory)")
    train.add_argument("--resume", type=Path, metavar="RUN", help="go on from the last checkpoint of a run")
    train.add_argument("--replay", type=Path, metavar="RUN",
                       help="learn from the recorded rollouts of a run, without generators and harnesses")
    train.set_defaults(run=_train)

    capture = commands.add_parser(
        "capture", help="run a harness once and say what a trainer would get",
        usage="lightning-ray capture --model DIR [options] -- COMMAND...",
        description="{task}, {base_url} and {model} are filled in where the command has them. Endpoints are told by "
                    "OPENAI_BASE_URL, OPENAI_API_BASE, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and "
                    "ANTHROPIC_AUTH_TOKEN. Any setting can be given as --part.field VALUE.")
    capture.add_argument("--model", type=Path, metavar="DIR", help="model directory (default: the configuration's)")
    capture.add_argument("--config", type=Path, metavar="FILE", help="YAML file; without COMMAND its harness is run")
    capture.add_argument("--task", type=Path, metavar="FILE", help="take the first task of this file (default: a "
                                                                   "generated one-line bug)")
    capture.add_argument("--mount", action="append", default=[], metavar="HOST[:INSIDE]",
                         help="show the sandbox a directory or file, read-only (repeatable)")
    capture.add_argument("--no-sandbox", action="store_true", help="run with your own rights and environment")
    capture.add_argument("--no-parity", action="store_true", help="do not recompute log-probs with the learner")
    capture.add_argument("--json", action="store_true", help="print the report as JSON")
    capture.set_defaults(run=_capture)

    evaluate = commands.add_parser("evaluate", help="measure a policy on tasks, through its harness")
    evaluate.add_argument("config", type=Path, help="YAML file; --policy.path DIR names the model")
    evaluate.add_argument("--split", choices=("heldout", "train"), default="heldout", help="which tasks (heldout)")
    evaluate.set_defaults(run=_evaluate)

    compare = commands.add_parser("compare", help="compare two evaluations on the same instances")
    compare.add_argument("first", type=Path, help="results.json of one policy")
    compare.add_argument("second", type=Path, help="results.json of the other")
    compare.set_defaults(run=_compare, settings=False)

    view = commands.add_parser("view", help="read the rollouts of a run as conversations")
    view.add_argument("path", type=Path, help="a run directory or a Parquet file of rollouts")
    view.add_argument("--rollout", metavar="ID", help="show this one whole")
    view.add_argument("--step", type=int, help="list the rollouts of this step (default: the last)")
    view.set_defaults(run=_view, settings=False)

    doctor = commands.add_parser("doctor", help="what this machine can isolate, and what memory a configuration needs")
    doctor.add_argument("--config", type=Path, metavar="FILE", help="compute its memory on each device")
    doctor.add_argument("--device-gib", type=float, metavar="GIB", default=80.0, help="memory of one device (80)")
    doctor.set_defaults(run=_doctor)
    return parser


def _train(options: argparse.Namespace, overrides: list[str]) -> int:
    from rich.console import Console

    from lightning_ray.observe.progress import LineProgress, LiveProgress
    from lightning_ray.run_directory import RunDirectory

    earlier = options.resume or options.replay
    if options.resume and options.replay:
        raise ConfigError("train: --resume goes on with a run, --replay learns from its record. Give one of them")
    if options.config is None and earlier is None:
        raise ConfigError("train: no configuration was given. Name a YAML file, as jobs/quickstart.yaml")
    if earlier is not None:
        RunDirectory.existing(earlier)
    config = Config.load(options.config or earlier / "config.yaml", overrides)
    console = Console(highlight=False, soft_wrap=True)
    progress = LiveProgress(config.run.steps, console) if console.is_terminal else LineProgress(console)
    if options.replay:
        return _replay(config, options.replay, progress)

    from lightning_ray.trainer import RunFailed, Trainer

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
    except Exception as error:
        if trainer.run is None or isinstance(error, ConfigError):  # nothing was started: the input is bad
            raise
        traceback.print_exc()
        print(f"lightning-ray: the run failed: {type(error).__name__}, see above", file=sys.stderr)
        _say_how_to_go_on(trainer)
        return FAILED
    finally:
        trainer.stop()
        progress.close()
    return DONE


def _capture(options: argparse.Namespace, overrides: list[str]) -> int:
    from lightning_ray.harness.capture import CaptureFailed, capture, settings
    from lightning_ray.harness.report import lines

    what = settings(model=options.model, command=options.command, config=options.config, task=options.task,
                    mounts=options.mount, sandboxed=not options.no_sandbox, parity=not options.no_parity,
                    overrides=overrides)
    print("lightning-ray: starting an engine, this can take a minute", file=sys.stderr)
    try:
        with redirect_stdout(sys.stderr):  # what libraries print is no part of the report
            report = capture(what)
    except CaptureFailed as error:
        print(f"lightning-ray: the capture failed: {error}", file=sys.stderr)
        return FAILED
    print(json.dumps(report.as_dict(), indent=2) if options.json else "\n".join(lines(report)))
    return FAILED if report.ending.end == "infra_failed" else DONE


def _replay(config: Config, source: Path, progress: "Progress") -> int:
    from lightning_ray.replay import Replay

    try:
        for _ in Replay(config, source, progress=progress).steps():
            pass
    finally:
        progress.close()
    return DONE


def _evaluate(options: argparse.Namespace, overrides: list[str]) -> int:
    config = Config.load(options.config, overrides)

    from rich.console import Console

    from lightning_ray.evaluation.measure import Evaluation
    from lightning_ray.evaluation.scores import NothingJudged, lines
    from lightning_ray.observe.progress import LineProgress

    console = Console(highlight=False, soft_wrap=True)
    progress = LineProgress(console)
    evaluation = Evaluation(config, split=options.split, progress=progress)
    try:
        results = evaluation.measure()
    except NothingJudged as error:
        print(f"lightning-ray: the evaluation failed: {error}", file=sys.stderr)
        return FAILED
    finally:
        progress.close()
    for line in [*lines(results), f"record: {evaluation.run.root / 'results.json'}"]:
        console.print(line, markup=False)
    return DONE


def _compare(options: argparse.Namespace, overrides: list[str]) -> int:
    from lightning_ray.evaluation.scores import compare_files

    for name, value in compare_files(options.first, options.second).items():
        print(f"{name:17} {value}")
    return DONE


def _say_how_to_go_on(trainer) -> None:
    if trainer.run is not None and trainer.run.complete_checkpoints():
        print(f"lightning-ray: go on with: lightning-ray train --resume {trainer.run.root}", file=sys.stderr)


def _view(options: argparse.Namespace, overrides: list[str]) -> int:
    from lightning_ray.observe.viewer import view

    return view(options.path, step=options.step, rollout_id=options.rollout)


def _doctor(options: argparse.Namespace, overrides: list[str]) -> int:
    from lightning_ray.doctor import isolation_lines, memory_lines

    if overrides and options.config is None:
        raise ConfigError(f"doctor: {overrides[0]!r} changes a configuration, but none was given. Add --config FILE")
    config = Config.load(options.config, overrides) if options.config else None
    lines, isolated = isolation_lines(config or Config())
    print("\n".join(lines))
    fits = True
    if config is not None:
        lines, fits = memory_lines(config, options.device_gib)
        print("\n".join(["", *lines]))
    return DONE if isolated and fits else FAILED


if __name__ == "__main__":
    sys.exit(main())
