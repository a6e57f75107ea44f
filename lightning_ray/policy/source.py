"""Where the policy comes from: a model directory, or a tiny one that is made on the spot."""

import ctypes
import gc
from pathlib import Path

from lightning_ray.config import Config, ConfigError, PolicyConfig
from lightning_ray.observe.progress import Progress
from lightning_ray.policy.directory import check_context, check_directory, read_json


def check_policy(config: PolicyConfig) -> None:
    """Raises `ConfigError` for a directory that is missing or unusable. Reads only small files."""
    if config.chat_template is not None and not config.chat_template.expanduser().is_file():
        raise ConfigError(f"policy.chat_template: there is no file {config.chat_template}. Give a Jinja template file")
    if config.warm_start is not None and config.warm_start.model is not None:
        model = config.warm_start.model.expanduser()
        check_directory("policy.warm_start.model", model)
        check_context(config.max_context, read_json("policy.warm_start.model", model / "config.json"))
    if config.path is None:
        return
    path = config.path.expanduser()
    check_directory("policy.path", path)
    if "max_context" in config.model_fields_set:  # else capture fits it to the model
        check_context(config.max_context, read_json("policy.path", path / "config.json"))
    tokenizer = read_json("policy.path", path / "tokenizer_config.json")
    has_template = (path / "chat_template.jinja").is_file() or tokenizer.get("chat_template")
    if not has_template and config.chat_template is None:
        raise ConfigError(f"policy.path: the tokenizer in {config.path} has no chat template. Give one with "
                          "policy.chat_template FILE")


def policy_directory(config: PolicyConfig, run: Config, progress: Progress) -> Path:
    """The model directory to start from, made if need be."""
    if config.path is not None:
        return config.path.expanduser().absolute()
    from lightning_ray.policy.warm_start import POSITIONS, make_policy

    if config.warm_start.model is None:
        check_context(config.max_context, {"max_position_embeddings": POSITIONS})
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
