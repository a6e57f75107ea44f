"""Installs a harness in a place of its own below a cache directory, once for each set of pinned packages. A place is
marked when it is whole; one that is not is made again.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "lightning_ray" / "harnesses"
WHOLE = ".whole"
TIMEOUT_S = 900


class Unavailable(Exception):
    """This machine cannot install or run the harness; the text says why."""


@dataclass(frozen=True, slots=True)
class Npm:
    """Packages of the npm registry, `name@version`; the first one is the harness."""

    packages: tuple[str, ...]

    @property
    def version(self) -> str:
        return self.packages[0].rpartition("@")[2]


@dataclass(frozen=True, slots=True)
class Present:
    """The harness is in the environment that runs the tests."""

    package: str

    @property
    def version(self) -> str:
        from importlib.metadata import version

        return version(self.package)


Install = Npm | Present


@dataclass(frozen=True, slots=True)
class Place:
    """Where a harness lies. `bin` holds its programs; `mounts` are the host paths that it needs, shown at their own
    paths."""

    bin: Path
    mounts: tuple[Path, ...]


def install(name: str, how: Install) -> Place:
    """Raises `Unavailable`."""
    if isinstance(how, Present):
        return Place(Path(sys.prefix) / "bin", (Path(sys.prefix), Path(sys.base_prefix)))
    digest = hashlib.sha256(json.dumps([type(how).__name__, *how.packages]).encode()).hexdigest()[:8]
    place = CACHE / f"{name}-{how.version}-{digest}"
    return _npm(place, how)


def _npm(place: Path, how: Npm) -> Place:
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        raise Unavailable("node and npm are not installed")
    if not (place / WHOLE).exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        _run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(place), *how.packages])
        (place / WHOLE).touch()
    real = Path(node).resolve()
    return Place(place / "node_modules" / ".bin", (place,) if real.is_relative_to("/usr") else (place, real))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(command[:3])} …` failed: {(done.stderr or done.stdout).strip()[-300:]}")
