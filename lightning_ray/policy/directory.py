"""A model directory in Hugging Face format: whether it is one, and which one it is."""

import hashlib
import json
from pathlib import Path
from typing import Any

from lightning_ray.config import ConfigError

HASHED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
"""Files of a model directory that decide what it says."""


def check_directory(field: str, path: Path) -> None:
    """Raises `ConfigError`, naming `field`, where `path` is no model directory. Reads nothing."""
    path = path.expanduser()
    if not path.is_dir():
        raise ConfigError(f"{field}: there is no directory {path}. Give a model directory on this machine (a model of "
                          "a hub is fetched first)")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{field}: {path} is no model directory (it has no config.json). Give a directory in Hugging "
                          "Face format")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"{field}: {path} holds no weights (*.safetensors). Save the model with save_pretrained "
                          "first")
    if not (path / "tokenizer_config.json").is_file():
        raise ConfigError(f"{field}: {path} has no tokenizer (tokenizer_config.json). Save the tokenizer beside the "
                          "model")


def read_json(field: str, file: Path) -> dict[str, Any]:
    """One of the directory's JSON files. Raises `ConfigError`, naming `field`."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}: {file} cannot be read ({error}). Save the model again") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{field}: {file} holds no JSON object. Save the model again")
    return content


def longest_context(settings: dict[str, Any]) -> int | None:
    """Tokens, by the model's config.json; None where it does not say."""
    return settings.get("max_position_embeddings") or settings.get("text_config", {}).get("max_position_embeddings")


def check_context(max_context: int, settings: dict[str, Any]) -> None:
    """Raises `ConfigError` where the model of this config.json is too short. Where its positions are scaled by a factor
    the engine decides."""
    longest = longest_context(settings)
    if longest and max_context > longest and '"factor"' not in json.dumps(settings):
        raise ConfigError(f"policy.max_context: {max_context} is more than the model's {longest} positions. Give "
                          f"--policy.max_context {longest}, or less")


def model_digest(directory: Path) -> str:
    """SHA-256 over names and contents of the model's files."""
    total = hashlib.sha256()
    for path in sorted({path for pattern in HASHED for path in directory.glob(pattern)}):
        with path.open("rb") as file:
            total.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
