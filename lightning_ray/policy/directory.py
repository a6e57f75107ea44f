"""A model directory in Hugging Face format: whether it is one, and which one it is."""

import hashlib
from pathlib import Path

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


def model_digest(directory: Path) -> str:
    """SHA-256 over names and contents of the model's files."""
    total = hashlib.sha256()
    for path in sorted({path for pattern in HASHED for path in directory.glob(pattern)}):
        with path.open("rb") as file:
            total.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()
