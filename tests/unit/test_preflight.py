"""preflight.py: what is found before anything starts."""

from pathlib import Path

import pytest

from lightning_ray.config import ConfigError
from lightning_ray.preflight import COPY, check_stays


def test_a_run_directory_in_rays_copy_of_a_job_is_bad_input(tmp_path, monkeypatch):
    copy = tmp_path / "session" / "runtime_resources" / COPY / "_ray_pkg_1"
    copy.mkdir(parents=True)
    check_stays(Path("runs"))
    monkeypatch.chdir(copy)
    with pytest.raises(ConfigError, match=r"run\.dir: 'runs' .* absolute path"):
        check_stays(Path("runs"))
    check_stays(tmp_path)
