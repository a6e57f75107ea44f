"""torchvision's stand-in: found by this process and those it starts, importable, unusable; a real one is left alone."""

import importlib.util
import os
import subprocess
import sys

import pytest

from lightning_ray.generator import text_only

IMPORT = "from torchvision.transforms.v2 import functional as F; from torchvision.io import ImageReadMode"


@pytest.fixture
def places(monkeypatch):
    """As they are in a process in which nothing has stood in yet."""
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place != text_only.STAND_INS])
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")


@pytest.fixture
def torchvision(monkeypatch):
    """Whether one is installed, as the test says."""
    def say(installed: bool) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    return say


def child(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True)


def test_names_can_be_imported_in_a_child_and_not_used(places, torchvision):
    torchvision(installed=False)
    text_only.allow_text_only()
    assert text_only.STAND_INS in sys.path
    assert os.environ["PYTHONPATH"] == os.pathsep.join(["/elsewhere", text_only.STAND_INS])
    assert child(f"{IMPORT}; F.InterpolationMode.BILINEAR, ImageReadMode.RGB").returncode == 0
    used = child(f"{IMPORT}; F.resize(1)")
    assert "ImportError: torchvision.transforms.v2.functional.resize is needed" in used.stderr


def test_an_installed_torchvision_is_left_alone(places, torchvision):
    torchvision(installed=True)
    text_only.allow_text_only()
    assert text_only.STAND_INS not in sys.path and os.environ["PYTHONPATH"] == "/elsewhere"
