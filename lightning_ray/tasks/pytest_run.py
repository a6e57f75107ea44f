"""This installation's pytest inside a sandbox: mounted read-only, package by package, so that nothing else of ours gets
inside, and run there by a driver of ours. Validation (`suite.py`) and grading (`swe.py`) do it in the same way, so that
a test that passes there passes here.
"""

import importlib.util
import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_ray.sandbox.base import ExecResult, Mount, Sandbox
from lightning_ray.tasks.verdicts import messages

RUNNER = "/opt/runner"
"""Where pytest is mounted inside."""
PARTS = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
"""pytest and what it imports; `py` is one file of pytest's own."""
DRIVER = (Path(__file__).parent / "pytest_driver.py").read_text()
PRELOAD = (
    "_pytest.assertion.rewrite", "_pytest.assertion.util", "_pytest.capture", "_pytest.doctest", "_pytest.unittest",
    "_pytest.python", "_pytest.runner", "_pytest.reports", "_pytest.skipping", "_pytest.terminal", "_pytest.fixtures",
    "_pytest.tmpdir", "_pytest.monkeypatch", "_pytest.threadexception", "_pytest.unraisableexception", "unittest.mock",
    "pygments.lexers.python", "pygments.formatters.terminal", "difflib", "pprint", "inspect", "traceback", "doctest",
)  # fmt: skip
"""What the runner would import late, when the workspace's modules could stand in its way."""


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


async def run_pytest(
    sandbox: Sandbox, files: Sequence[str], *, paths: Sequence[str], conftest: bool, timeout_s: float,
    tests: Sequence[str] | None = None, added: Mapping[str, Sequence[int]] | None = None, config: str | None = None,
    plugins: Sequence[str] = (), python: str = "python3",
) -> tuple[ExecResult, list[dict[str, Any]]]:
    """Runs test files (paths in the workspace): how the driver ended, and what it said (`pytest_driver.py`).

    `tests`: these ids only. `paths`: folders that imports are looked up in. `added`: lines that a patch added, which
    are watched. `config`, `conftest`: whether the workspace's own configuration file and conftest.py files are loaded.
    """
    arguments = ["-c", config or "/dev/null", *([] if conftest else ["--noconftest"])]
    for plugin in plugins:
        arguments += ["-p", plugin]
    nonce = secrets.token_hex(16)
    order = {"nonce": nonce, "runner": RUNNER, "preload": PRELOAD, "tests": tests, "files": files, "paths": paths,
             "arguments": arguments, "added": added or {}}  # fmt: skip
    command = f"exec {shlex.quote(python)} -I -c {shlex.quote(DRIVER)}"
    done = await sandbox.exec(command, timeout_s=timeout_s, stdin=json.dumps(order).encode())
    return done, messages(done.output, nonce)
