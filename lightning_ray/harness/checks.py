"""Whether a harness can start: bad settings are found before anything starts, without importing or running it. What the
sandbox will show is read off the settings and this machine's file system.
"""

import ast
import importlib.machinery
import os
import shutil
import sys
from pathlib import Path

from lightning_ray.config import ConfigError, HarnessConfig
from lightning_ray.harness.spec import split_entry
from lightning_ray.sandbox import filesystem
from lightning_ray.sandbox.base import WORKSPACE, SandboxSpec

SYSTEM_DIRECTORIES = ("/usr", "/bin", "/lib", "/lib64", "/sbin")
"""Host directories that every sandbox shows read-only."""


def check_harness(config: HarnessConfig, in_image: bool = False) -> None:
    """ConfigError, naming field, value and remedy, for a harness that could not start. Imports nothing of it.
    `in_image`: the sandbox shows a container image's programs, which are not known here."""
    for source, target in config.mounts.items():
        if not Path(source).expanduser().exists():
            raise ConfigError(f"harness.mounts: {source!r} does not exist. Give a directory or file of this machine")
        _absolute("harness.mounts", target)
    for path in config.files:
        _absolute("harness.files", path)
    if config.kind == "python":
        _check_entry(config.entry)
    else:
        _check_command(config, in_image)


def _absolute(name: str, path: str) -> None:
    if not path.startswith("/") or ".." in Path(path).parts:
        raise ConfigError(f"{name}: {path!r} is not an absolute path inside the sandbox. Write it as /…")


def _check_entry(entry: str) -> None:
    module, function = split_entry(entry)
    spec = _find_module(module)
    if spec is None:
        raise ConfigError(
            f"harness.entry: there is no module {module!r} (from {entry!r}). Install it in this environment, or run "
            "from the directory that holds it, or put that directory on PYTHONPATH")
    origin = Path(spec.origin or "")
    if origin.suffix == ".py" and not _may_define(origin.read_text(encoding="utf-8"), function):
        raise ConfigError(
            f"harness.entry: {origin} defines no {function!r} (from {entry!r}). Name one of its functions")


def _find_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """Where `name` would be imported from. Unlike `importlib.util.find_spec` it imports no parent package."""
    path: list[str] | None = None
    spec = None
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        full = ".".join(parts[:end])
        found = (finder.find_spec(full, path) for finder in sys.meta_path)
        spec = next((candidate for candidate in found if candidate is not None), None)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def _may_define(source: str, name: str) -> bool:
    """Whether the module's top level binds `name`, as far as its text tells."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
    return False


def _check_command(config: HarnessConfig, in_image: bool) -> None:
    if not config.command:
        raise ConfigError("harness.command is empty. Give the program and its arguments, as [mini, -t, '{task}']")
    if in_image:
        return
    program = config.command[0]
    if "/" not in program:
        path = config.env.get("PATH") or filesystem.environment(SandboxSpec("check", Path("/")))["PATH"]
        places = [f"{directory}/{program}" for directory in path.split(":") if directory]
        found = next((place for place in places if _host_path(config, place) is not None), None)
        if found is None:
            raise ConfigError(
                f"harness.command: there is no {program!r} on the sandbox's PATH ({path}). {_visible_remedy(program)}")
        program = found
    if not program.startswith("/") or program.startswith(f"{WORKSPACE}/"):
        return  # part of the task's workspace: another for every task
    host = _host_path(config, program)
    if host is None:
        raise ConfigError(f"harness.command: {program!r} does not exist in the sandbox. {_visible_remedy(program)}")
    if not os.access(host, os.X_OK) or host.is_dir():
        raise ConfigError(f"harness.command: {program!r} is not executable. Make it so (chmod +x {host})")
    interpreter = _interpreter(host)
    if interpreter is not None and _host_path(config, interpreter) is None:
        raise ConfigError(
            f"harness.command: {program!r} starts {interpreter!r}, which the sandbox does not show "
            f"(it leads to {Path(interpreter).resolve()}). {_visible_remedy(interpreter)}")


def _visible_remedy(program: str) -> str:
    source = Path(program)
    installed = source if source.is_absolute() else Path(shutil.which(program) or "")
    where = f" It is {installed} on this machine." if installed.is_file() else ""
    return (f"The sandbox shows the system's directories and what harness.mounts names:{where} Mount its installation "
            "read-only at the same path, and everything that it links to (for a virtual environment: the base "
            "interpreter too), and give the program's full path")


def _host_path(config: HarnessConfig, inside: str, hops: int = 16) -> Path | None:
    """The host's file behind a path of the sandbox, or None where the sandbox does not show it. Every link on the way
    must be visible as well."""
    inside = os.path.normpath(inside)
    shown = dict(config.mounts)
    if filesystem.system_python().startswith(filesystem.INTERPRETER):
        shown[sys.base_prefix] = filesystem.INTERPRETER
    for source, target in shown.items():
        root = target.rstrip("/")
        if inside == root or inside.startswith(f"{root}/"):
            host = Path(source).expanduser() / inside[len(root):].lstrip("/")
            break
    else:
        if not any(inside.startswith(f"{directory}/") for directory in SYSTEM_DIRECTORIES):
            return None
        host = Path(inside)
    if host.is_symlink():
        link = os.path.join(os.path.dirname(inside), os.readlink(host))
        return _host_path(config, link, hops - 1) if hops else None
    return host if host.exists() else None


def _interpreter(script: Path) -> str | None:
    """The program on a script's first line, or None for anything else."""
    with script.open("rb") as file:
        first = file.readline(512)
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode(errors="replace").split()
    return words[0] if words else None
