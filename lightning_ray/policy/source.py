"""Where the policy comes from: a model directory, or a tiny one that is made on the spot."""

import ctypes
import gc
import json
from pathlib import Path

from lightning_ray.config import Config, ConfigError, PolicyConfig
from lightning_ray.observe.progress import Progress
from lightning_ray.policy.directory import check_directory


def check_policy(config: PolicyConfig) -> None:
    """Raises `ConfigError` for a directory that is missing or unusable. Reads only small files."""
    if config.chat_template is not None and not config.chat_template.expanduser().is_file():
        raise ConfigError(f"policy.chat_template: there is no file {config.chat_template}. Give a Jinja template file")
    if config.warm_start is not None and config.warm_start.model is not None:
        check_directory("policy.warm_start.model", config.warm_start.model)
    if config.path is None:
        return
    path = config.path.expanduser()
    check_directory("policy.path", path)
    tokenizer = path / "tokenizer_config.json"
    has_template = (path / "chat_template.jinja").is_file() or json.loads(tokenizer.read_text()).get("chat_template")
    if not has_template and config.chat_template is None:
        raise ConfigError(f"policy.path: the tokenizer in {config.path} has no chat template. Give one with "
                          "policy.chat_template FILE")


def policy_directory(config: PolicyConfig, run: Config, progress: Progress) -> Path:
    """The model directory to start from, made if need be."""
    if config.path is not None:
        return config.path.expanduser().absolute()
    from lightning_ray.policy.warm_start import make_policy

    try:
        return make_policy(config.warm_start, run.harness.settings, progress.warm_up)
    finally:
        return_freed_memory()


def return_freed_memory() -> None:
    """To the system: after a warm-up glibc keeps for itself what was freed, gigabytes for a model of 135 M parameters,
    for as long as the run lasts beside it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
