"""The YAML files of jobs/: each is valid, and the coding recipes say why of every value."""

import re
from pathlib import Path

import pytest

from lightning_ray.config import Config

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.mark.parametrize("path", sorted(JOBS.glob("*.yaml")), ids=lambda path: path.name)
def test_settings_are_valid(path):
    assert Config.load(path).run.name


@pytest.mark.parametrize("name", ["swe_qwen3_5_9b.yaml", "swe_laptop.yaml"])
def test_every_value_has_its_reason(name):
    bare = [line.split(":")[0].strip() for line in (JOBS / name).read_text().splitlines()
            if re.match(r" {2,8}\w+: [^|\s]", line) and "#" not in line]
    assert set(bare) <= {"name", "instance_template", "most_tokens", "tokens_penalty"}


def test_the_laptop_recipe_takes_the_model_that_the_job_fetches():
    recipe = Config.load(JOBS / "swe_laptop.yaml")
    assert f'Path("{recipe.policy.warm_start.model}")' in (JOBS / "fetch_smollm2.py").read_text()
