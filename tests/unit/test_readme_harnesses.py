"""The entries of the README's "Bring your harness" are those that `make test-slow` runs."""

import re
from pathlib import Path

import pytest
import yaml

from lightning_ray.config import HarnessConfig
from tests.harnesses.table import ENTRIES

README = Path(__file__).parents[2] / "README.md"
PROGRAMS = re.compile(r"(VENV/bin|/opt/[a-z]+/node_modules/\.bin)/")


def entry(name: str) -> dict:
    """The `harness` part of the YAML block that begins with a comment of this name."""
    (text,) = re.findall(rf"```yaml\n# {re.escape(name)}: .*\n((?:.*\n)*?)```", README.read_text())
    block = yaml.safe_load(text)
    return {"kind": "command", **block.get("harness", block)}


@pytest.mark.parametrize("name", ENTRIES)
def test_the_readme_says_what_the_suite_runs(name):
    told, run = HarnessConfig(**entry(name)), ENTRIES[name]
    assert [PROGRAMS.sub("{bin}/", part) for part in told.command] == run.command
    assert told.env == run.env
    assert told.files == {path: text for path, text in run.files.items() if not path.endswith(".py")}
    assert (told.result.model_dump() if told.result else None) == run.result
