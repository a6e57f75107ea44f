"""This installation's pytest inside a sandbox: mounted read-only, package by package, so that nothing else of ours gets
inside. Validation (`suite.py`) and grading (`swe.py`) use the same one.
"""

import importlib.util
from pathlib import Path

from lightning_ray.sandbox.base import Mount

RUNNER = "/opt/runner"
"""Where pytest is mounted inside."""
PARTS = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
"""pytest and what it imports; `py` is one file of pytest's own."""


def runner_mounts() -> tuple[Mount, ...]:
    """ValueError, naming it, where this environment lacks a part."""
    found = []
    for name in PARTS:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ValueError(f"running tests needs the package {name!r} in this environment; pip install pytest")
        origin = Path(spec.origin)
        source = origin.parent if origin.name == "__init__.py" else origin
        found.append(Mount(source, f"{RUNNER}/{source.name}"))
    return tuple(found)
