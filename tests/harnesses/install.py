"""Installs a harness in a place of its own below a cache directory, once for each set of pinned packages.

`npm` packages go below a prefix, Python packages into a virtual environment. A place is marked when it is whole; one
that is not is made again.
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
class Venv:
    """Packages of PyPI, `name==version`; the first one is the harness."""

    packages: tuple[str, ...]
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"

    @property
    def version(self) -> str:
        return self.packages[0].partition("==")[2]


@dataclass(frozen=True, slots=True)
class Present:
    """The harness is in the environment that runs the tests."""

    package: str

    @property
    def version(self) -> str:
        from importlib.metadata import version

        return version(self.package)


Install = Npm | Venv | Present


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
    made = _npm if isinstance(how, Npm) else _venv
    return made(place, how)


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


def _venv(place: Path, how: Venv) -> Place:
    python = interpreter(how.python)
    if not (place / WHOLE).exists():
        shutil.rmtree(place, ignore_errors=True)
        _run([python, "-m", "venv", str(place)])
        _run([str(place / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", *how.packages])
        (place / WHOLE).touch()
    base = subprocess.run([python, "-c", "import sys; print(sys.base_prefix)"], capture_output=True, text=True,
                          check=True).stdout.strip()
    return Place(place / "bin", (place,) if base == "/usr" else (place, Path(base)))


def interpreter(version: str) -> str:
    """A Python of that version on this machine: on the PATH, or one that pyenv keeps."""
    if sys.version_info[:2] == tuple(map(int, version.split("."))):
        return f"{sys.base_prefix}/bin/python{version}"
    kept = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found = [shutil.which(f"python{version}"), *map(str, kept.glob(f"{version}.*/bin/python{version}"))]
    for candidate in filter(None, found):
        if subprocess.run([candidate, "--version"], capture_output=True, check=False).returncode == 0:
            return candidate
    raise Unavailable(f"Python {version} is not installed")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(command[:3])} …` failed: {(done.stderr or done.stdout).strip()[-300:]}")
