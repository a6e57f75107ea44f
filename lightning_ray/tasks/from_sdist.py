"""Coding tasks made on the spot from a Python package that ships its tests: real code, real tests, no hub.

    package = unpack(download("inflection==0.5.1", cache), "inflection==0.5.1")
    made = await Maker(make_sandbox, directory).tasks(package, count=20, seed=0)

A bug is one mutation (`mutations.py`) of the package's source. It becomes a task when the suite tells it from the
original: tests that pass stably before, of which some fail stably with it, and all pass again with the reverse patch,
as the `swe` grader sees it.
Test files are no part of the agent's workspace: they enter at grading (`grading.files`). The package's dependencies
are not installed, so packages without any are what this is for.

Mutations that become none are counted under a name of `WHY`.
"""

import asyncio
import hashlib
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lightning_ray.config import ConfigError, RewardConfig
from lightning_ray.sandbox.base import Mount, Sandbox, SandboxSpec, running
from lightning_ray.tasks.base import Task
from lightning_ray.tasks.mutations import Mutation, choose, mutations
from lightning_ray.tasks.patches import git_patch
from lightning_ray.tasks.pytest_run import runner_mounts
from lightning_ray.tasks.statements import Failure, Plain, Writer
from lightning_ray.tasks.suite import SuiteRun, run_suite
from lightning_ray.tasks.swe import SweGrader
from lightning_ray.tasks.workspaces import Workspaces

REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.!+_-]+)\Z")
DOWNLOAD_TIMEOUT_S = 600
FILE_BYTES = 500_000
"""Larger files of a source package are left out of the workspace."""
TEST_FILE = re.compile(r"(test_.*|.*_test|tests)\.py\Z")
TEST_FOLDER = re.compile(r"tests?\Z")
NO_SOURCE = re.compile(r"(setup|conftest|noxfile|conf)\.py\Z")
NO_WORKSPACE = re.compile(r".*\.egg-info\Z|docs?\Z|\.git.*|\.tox\Z|__pycache__\Z|examples?\Z|PKG-INFO\Z")
SLOW_TEST_S = 5.0
SLOWER, GRACE_S = 5.0, 5.0
"""A suite with a bug may take so many times as long as without, and so many seconds more."""
WHY = {
    "survived": "no test fails with the bug",
    "breaks_all": "no test passes with the bug",
    "too_slow": f"the suite takes over {SLOWER:g} times as long with the bug, or does not end",
    "flaky": "a test fails with the bug in one run and passes in another",
    "not_cured": "the grader does not pass the reverse patch",
    "no_statement": "no problem statement was written",
}

@dataclass(frozen=True, slots=True)
class Package:
    name: str
    version: str
    files: dict[str, str]
    """What the agent sees."""
    tests: dict[str, str]
    """What enters at grading: test files and whatever lies beside them."""

    @property
    def suite(self) -> list[str]:
        return sorted(name for name in self.tests if TEST_FILE.match(PurePosixPath(name).name))

    @property
    def conftest(self) -> bool:
        return any(PurePosixPath(name).name == "conftest.py" for name in self.tests)

    @property
    def paths(self) -> list[str]:
        """Folders for imports: the root, `src`, and those of the tests, which import their own helpers."""
        return [".", "src", *sorted({str(PurePosixPath(name).parent) for name in self.suite} - {".", "src"})]

    @property
    def sources(self) -> list[str]:
        return sorted(name for name in self.files if name.endswith(".py")
                      and not NO_SOURCE.match(PurePosixPath(name).name))


def download(requirement: str, directory: Path) -> Path:
    """The source package, from the registry that `pip` is configured for; what is there already is used. Raises
    `ConfigError` for a bad requirement or a download that failed."""
    match = REQUIREMENT.match(requirement)
    if match is None:
        raise ConfigError(f"--from-sdist: {requirement!r} is not understood. Write NAME==VERSION")
    place = directory / requirement
    place.mkdir(parents=True, exist_ok=True)
    if not (found := _archives(place)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", match[1], "--dest",
                   str(place), requirement]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"--from-sdist: {requirement} took over {DOWNLOAD_TIMEOUT_S} s to download. Is the "
                              "package registry reachable?") from None
        found = _archives(place)
        if done.returncode or not found:
            raise ConfigError(f"--from-sdist: pip could not download the source of {requirement}: "
                              f"{' '.join(done.stderr.split())[-300:]}. Is it published as a source package, and is "
                              "the registry reachable?")
    return found[0]


def _archives(directory: Path) -> list[Path]:
    return sorted([*directory.glob("*.tar.gz"), *directory.glob("*.zip")])


def unpack(archive: Path, requirement: str) -> Package:
    """Reads an archive into memory (nothing of it is run or written). `ConfigError` where it ships no tests."""
    name, _, version = requirement.partition("==")
    files: dict[str, str] = {}
    for path, content in _members(archive):
        inside = PurePosixPath(path).parts[1:]
        if not inside or ".." in inside or any(NO_WORKSPACE.match(part) for part in inside):
            continue
        try:
            files["/".join(inside)] = content.decode()
        except UnicodeDecodeError:
            continue
    tests = {path: text for path, text in files.items() if _is_test(path)}
    package = Package(name, version, {path: text for path, text in files.items() if path not in tests}, tests)
    if not package.suite:
        raise ConfigError(f"--from-sdist: the source of {requirement} ships no test files. Take another package")
    if not package.sources:
        raise ConfigError(f"--from-sdist: the source of {requirement} holds no Python code. Take another package")
    return package


def _is_test(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return bool(TEST_FILE.match(parts[-1]) or parts[-1] == "conftest.py"
                or any(TEST_FOLDER.match(part) for part in parts[:-1]))


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zipped:
            for item in zipped.infolist():
                if not item.is_dir() and item.file_size <= FILE_BYTES:
                    yield item.filename, zipped.read(item)
        return
    with tarfile.open(archive) as packed:
        for item in packed:
            if item.isreg() and item.size <= FILE_BYTES and (content := packed.extractfile(item)):
                yield item.name, content.read()


def bugs(package: Package, count: int, seed: int) -> list[tuple[str, Mutation]]:
    """At most `count` (path, mutation), spread over the package's functions. Files that are no Python 3, or whose line
    ends a patch would have to spell out, are left out."""
    found: list[tuple[str, Mutation]] = []
    for path in package.sources:
        text = package.files[path]
        if "\r" in text or not text.endswith("\n"):
            continue
        try:
            found += [(path, mutation) for mutation in mutations(text)]
        except SyntaxError:
            continue
    by_mutation = {Mutation(each.kind, f"{path}:{each.function}", each.line, each.start, each.end, each.text):
                   (path, each) for path, each in found}
    return [by_mutation[each] for each in choose(list(by_mutation), count, f"{package.name}/{seed}")]


def sort_out(first: SuiteRun, second: SuiteRun) -> tuple[set[str], Counter[str]]:
    """The tests that passed twice and are not slow, and how many there are of each kind: `stable`, `slow`, `flaky`
    (passed once), `failing` (or skipped)."""
    kinds: dict[str, str] = {}
    for name in first.tests.keys() | second.tests.keys():
        passes = (name in first.passed()) + (name in second.passed())
        slow = passes == 2 and max(first.seconds[name], second.seconds[name]) > SLOW_TEST_S
        kinds[name] = "slow" if slow else ("failing", "flaky", "stable")[passes]
    return {name for name, kind in kinds.items() if kind == "stable"}, Counter(kinds.values())


def judge(good: set[str], first: SuiteRun, second: SuiteRun) -> tuple[list[str], list[str]] | str:
    """FAIL_TO_PASS and PASS_TO_PASS of a bug from two runs with it, or why it is no task. A test that did not run
    counts as failed: the module may not even import."""
    passes = [run.passed() & good for run in (first, second)]
    failing, passing = good - passes[0] - passes[1], passes[0] & passes[1]
    if not failing:
        return "survived" if passes[0] == passes[1] == good else "flaky"
    if not passing:
        return "breaks_all"
    if good - failing - passing:
        return "flaky"
    return sorted(failing), sorted(passing)


def failure_of(package: Package, failing: list[str], passing: list[str], run: SuiteRun) -> Failure:
    """What the agent may be told: a failing test, and no place in the code."""
    shown = next((run.shown[name] for name in failing if run.shown.get(name)), "(the code cannot be imported)")
    return Failure(package.name, package.version, len(failing), len(failing) + len(passing), shown)


@dataclass(slots=True)
class Made:
    """What became of one package."""

    tests: Counter[str]
    """Its tests by kind, without a bug."""
    suite_s: float
    """Seconds of its suite, without a bug."""
    tried: int
    dropped: Counter[str]
    rows: list[dict[str, Any]]
    """Instances in SWE-smith's schema."""


class Maker:
    """Validates bugs of packages in sandboxes, `at_once` at a time. `timeout_s` bounds the suite without a bug; with
    one it has `SLOWER` times as long as without."""

    def __init__(self, make: Callable[[SandboxSpec], Sandbox], root: Path, *, writer: Writer | None = None,
                 timeout_s: float = 60.0, at_once: int = 2):
        self._make = make
        self._workspaces = Workspaces(root)
        self._writer = writer or Plain()
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(at_once)

    async def tasks(self, package: Package, count: int, seed: int, ticked: Callable[[], None] = lambda: None) -> Made:
        """`ticked` is called for each bug that is done with. `ConfigError` where no test passes."""
        started = time.monotonic()
        runs = [await self._run(package, package.files, self._timeout_s) for _ in range(2)]
        suite_s = (time.monotonic() - started) / 2
        good, tests = sort_out(*runs)
        if not good:
            raise ConfigError(f"--from-sdist: no test of {package.name}=={package.version} passes stably here. It may "
                              f"need packages that are not installed: {' '.join(runs[0].output.split())[-300:]}")
        timeout_s = min(self._timeout_s, SLOWER * suite_s + GRACE_S)

        async def one(path: str, mutation: Mutation) -> dict[str, Any] | str:
            try:
                return await self._task(package, good, timeout_s, path, mutation)
            finally:
                ticked()

        outcomes = await asyncio.gather(*(one(*each) for each in bugs(package, count, seed)))
        return Made(tests, suite_s, len(outcomes), Counter(each for each in outcomes if isinstance(each, str)),
                    [each for each in outcomes if isinstance(each, dict)])

    async def _task(self, package: Package, good: set[str], timeout_s: float, path: str, mutation: Mutation
                    ) -> dict[str, Any] | str:
        before = package.files[path]
        after = mutation.apply(before)
        broken = {**package.files, path: after}
        first = await self._run(package, broken, timeout_s)
        if not first.ended:
            return "too_slow"
        if good <= first.passed():
            return "survived"
        found = judge(good, first, await self._run(package, broken, timeout_s))
        if isinstance(found, str):
            return found
        failing, passing = found
        patch = git_patch(path, before, after)
        row = {
            "instance_id": f"{package.name}-{package.version}.{mutation.kind}."
                           f"{hashlib.sha256(patch.encode()).hexdigest()[:10]}",
            "repo": f"pypi/{package.name}", "patch": patch, "FAIL_TO_PASS": failing, "PASS_TO_PASS": passing,
            "image_name": "", "problem_statement": "not written yet", "files": broken,
            "grader": "swe", "grading": {"files": package.tests, "paths": package.paths, "conftest": package.conftest},
        }
        if not await self._cures(Task.model_validate(row), git_patch(path, after, before), timeout_s):
            return "not_cured"
        statement = await self._writer.write(failure_of(package, failing, passing, first))
        return "no_statement" if statement is None else {**row, "problem_statement": statement}

    async def _run(self, package: Package, files: dict[str, str], timeout_s: float) -> SuiteRun:
        """One run of the suite over these files."""
        task = Task(instance_id=package.name, problem_statement="validation", files=files)
        async with self._sandbox(task, runner_mounts()) as sandbox:
            await sandbox.put({name: text.encode() for name, text in package.tests.items()})
            return await run_suite(sandbox, package.suite, conftest=package.conftest, paths=package.paths,
                                   timeout_s=timeout_s)

    async def _cures(self, task: Task, solution: str, timeout_s: float) -> bool:
        """Whether the grader that will judge rollouts calls the solution one."""
        grader = SweGrader(task, RewardConfig(timeout_s=timeout_s))
        async with self._sandbox(task, grader.mounts) as sandbox:
            return (await grader.grade(task, solution, sandbox)).passed

    @asynccontextmanager
    async def _sandbox(self, task: Task, mounts: tuple[Mount, ...]) -> AsyncIterator[Sandbox]:
        async with self._places:
            workspace = await asyncio.to_thread(self._workspaces.prepare, task)
            spec = SandboxSpec(f"validate.{task.instance_id}", workspace, mounts=mounts)
            async with running(self._make(spec)) as sandbox:
                yield sandbox
