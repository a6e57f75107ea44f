"""What a harness is told, and what it leaves behind: plain data and pure translation.

`check_harness` finds bad settings before anything starts, without importing the harness. `command_plan` turns
`HarnessConfig` and one task into a command line, an environment and files. Placeholders `{task}`, `{base_url}` and
`{model}` are filled in once: text that came in through a placeholder is never searched for placeholders again.
"""

import ast
import importlib.machinery
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_ray.config import ConfigError, HarnessConfig
from lightning_ray.sandbox import filesystem
from lightning_ray.sandbox.base import ENDPOINT_URL, WORKSPACE, Mount, SandboxSpec
from lightning_ray.tasks.base import Task

API_KEY = "none"
"""What SDKs get as a key because they want one. The endpoint is the identity; this is no secret."""
SYSTEM_DIRECTORIES = ("/usr", "/bin", "/lib", "/lib64", "/sbin")
"""Host directories that every sandbox shows read-only."""

_PLACEHOLDER = re.compile(r"(?<!\{)\{(task|base_url|model)\}(?!\})")
"""Not `{{task}}`: that is a template of the harness's own."""


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """One rollout to run."""

    rollout_id: str
    group_id: str
    task: Task
    mode: Literal["train", "evaluate"]
    seed: int
    temperature: float


@dataclass(frozen=True, slots=True)
class HarnessResult:
    """How the harness ended. Not `ok` is data: the rollout ends `harness_failed` with `exit_status` as its reason."""

    exit_status: str
    """The harness's own word (`Submitted`, `LimitsExceeded`), or `exit code N`."""
    ok: bool
    """Whether the patch is worth grading."""
    detail: str = ""
    """One line about a failure."""
    log: str = ""
    """The end of what the harness printed."""
    endpoint_failed: bool = False
    """It ended because its endpoint could not be reached or broke (5xx): then it is not to blame, and runs again."""

    @classmethod
    def from_dict(cls, values: Any) -> "HarnessResult":
        """What a Python harness returned. ValueError names what is wrong with it."""
        if not isinstance(values, dict):
            raise ValueError(f"a Python harness returns a dict with exit_status and ok, not {type(values).__name__}")
        missing = {"exit_status", "ok"} - values.keys()
        if missing:
            raise ValueError(f"the Python harness's result lacks {', '.join(sorted(missing))}")
        return cls(str(values["exit_status"]), bool(values["ok"]), str(values.get("detail", "")),
                   str(values.get("log", "")), bool(values.get("endpoint_failed", False)))


@dataclass(frozen=True, slots=True)
class CommandPlan:
    """A command harness for one task."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Absolute path inside the sandbox -> content."""


def fill(text: str, values: dict[str, str]) -> str:
    """`text` with the placeholders that `values` names filled in, in one pass."""
    return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)


def endpoint_environment(base_url: str, api_key: str = API_KEY) -> dict[str, str]:
    """The variables by which OpenAI and Anthropic SDKs find their endpoint. `base_url` has no `/v1`."""
    return {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_BASE": f"{base_url}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": api_key,
        "ANTHROPIC_AUTH_TOKEN": api_key,
    }


def command_plan(config: HarnessConfig, problem_statement: str, model: str,
                 base_url: str = ENDPOINT_URL) -> CommandPlan:
    """What to run in the sandbox for one task. `harness.env` wins over the endpoint's variables."""
    values = {"task": problem_statement, "base_url": base_url, "model": model}
    env = endpoint_environment(base_url) | {name: fill(value, values) for name, value in config.env.items()}
    return CommandPlan(
        argv=tuple(fill(part, values) for part in config.command),
        env=env,
        files={path: fill(content, values) for path, content in config.files.items()},
    )


def mounts(config: HarnessConfig) -> tuple[Mount, ...]:
    return tuple(Mount(Path(source).expanduser(), target) for source, target in config.mounts.items())


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


def split_entry(entry: str) -> tuple[str, str]:
    """`module:function` in its parts, or ConfigError."""
    module, _, function = entry.partition(":")
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(f"harness.entry: {entry!r} is not of the form module:function, as package.module:run")
    return module, function


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
