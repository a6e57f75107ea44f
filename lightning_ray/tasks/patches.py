"""What of an agent's patch is let into the grader's sandbox; and how a patch of ours is written.

A patch is read strictly, file by file; what is not understood whole is left out. Let in are regular files below the
repository. Left out, each with a reason, are: symbolic links and submodules, anything in `.git`, files that Python or a
test runner loads by itself (`.pth`, `sitecustomize`, `conftest`, runner and build configuration, entry points),
compiled Python, test files, and what is too large. A file that the task's own solution touches may be a test or a
configuration.

Some refusals are `suspicious`: nobody who only solves the task has a reason for them (an existing test changed, a
`conftest.py` made). A new test file or a `.pyc` is an everyday by-product: left out, and no more than that.
"""

import difflib
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath

FILE_BYTES = 1_000_000
"""Largest patch of one file."""
PATCH_BYTES = 4_000_000
FILES = 1000

LOADED = re.compile(
    r"(.*\.pth|(site|user)customize\.py|conftest\.py|\.?pytest\.(ini|toml)|tox\.ini|setup\.(cfg|py)|pyproject\.toml|"
    r"noxfile\.py|\.coveragerc|entry_points\.txt|python\d*\._pth|pyvenv\.cfg)\Z",
    re.IGNORECASE,
)
METADATA = re.compile(r".*\.(dist|egg)-info\Z", re.IGNORECASE)
COMPILED = re.compile(r".*\.py[co]\Z", re.IGNORECASE)
TEST_FILE = re.compile(
    r"(test_.*|.*_test|tests?)\.py\Z|.*_test\.(go|rs|c|cc|cpp)\Z|.*\.(test|spec)\.[cm]?[jt]sx?\Z", re.IGNORECASE
)
TEST_FOLDER = re.compile(r"(tests?|testing|__tests__|specs?)\Z", re.IGNORECASE)
HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
"""Lines of the old file, first line in the new one, lines of the new one."""
INDEX = re.compile(r"index [0-9a-f]{7,64}\.\.[0-9a-f]{7,64}(?: (\d{6}))?\Z")
MODE = re.compile(r"(old mode|new mode|deleted file mode|new file mode) (\d{6})\Z")
BINARY = re.compile(r"(literal|delta) \d+\Z")
ENCODED = re.compile(r"[A-Za-z][0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]+\Z")
ESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}
REGULAR = {"100644", "100755"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One file that was left out. `path` is empty where none could be read."""

    path: str
    reason: str
    suspicious: bool

    def __str__(self) -> str:
        return f"{self.reason}: {self.path}" if self.path else self.reason


@dataclass(slots=True)
class Filtered:
    patch: str = ""
    """What is let in."""
    paths: list[str] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    @property
    def suspicions(self) -> list[str]:
        return [str(refusal) for refusal in self.refusals if refusal.suspicious]


@dataclass(slots=True)
class Section:
    """The patch of one file."""

    lines: list[str]
    path: str = ""
    modes: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    """Why it cannot be understood; empty where it can."""

    @property
    def new(self) -> bool:
        return "new file mode" in self.modes


def git_patch(path: str, before: str, after: str) -> str:
    """One file's change as git writes it. Both texts end with a newline."""
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n" + "".join(lines)


def touched(patch: str) -> set[str]:
    """Paths that a (trusted) patch touches."""
    return {section.path for section in sections(patch) if not section.problem}


def filter_patch(patch: str, solution: set[str] = frozenset(), hidden: set[str] = frozenset()) -> Filtered:
    """Filter an agent's patch. `solution`: paths that the task's own solution touches. `hidden`: paths of test files
    that the grader brings from outside."""
    result = Filtered()
    size = 0
    seen: set[str] = set()
    for section in sections(patch):
        text = "\n".join(section.lines) + "\n"
        refusal = judge(section, solution, hidden)
        if refusal is None and section.path in seen:
            refusal = Refusal(section.path, "patched_twice", True)
        if refusal is None and (size + len(text) > PATCH_BYTES or len(result.paths) >= FILES):
            refusal = Refusal(section.path, "patch_too_large", False)
        seen.add(section.path)
        if refusal is not None:
            result.refusals.append(refusal)
            continue
        size += len(text)
        result.patch += text
        result.paths.append(section.path)
    return result


def judge(section: Section, solution: set[str], hidden: set[str]) -> Refusal | None:
    """Why one file is left out, or None where it is let in."""
    path = section.path
    if section.problem:
        return Refusal(path, section.problem, True)
    parts = PurePosixPath(path).parts
    if path.startswith("/") or ".." in parts or "/".join(parts) != path:
        return Refusal(path, "outside_the_workspace", True)
    if any(re.fullmatch(r"\.git|git~\d+", part.lower().rstrip(" .")) for part in parts):
        return Refusal(path, "git_directory", True)
    if any(mode not in REGULAR for mode in section.modes.values()):
        return Refusal(path, "not_a_regular_file", True)
    if sum(len(line) + 1 for line in section.lines) > FILE_BYTES:
        return Refusal(path, "file_too_large", False)
    if COMPILED.match(parts[-1]) or "__pycache__" in parts:
        return Refusal(path, "compiled_python", False)
    if any(METADATA.match(part) for part in parts):
        return Refusal(path, "package_metadata", False)
    if path in hidden:
        return Refusal(path, "test_file", True)
    if path in solution:
        return None
    if LOADED.match(parts[-1]):
        return Refusal(path, "loaded_by_itself", True)
    if TEST_FILE.match(parts[-1]) or any(TEST_FOLDER.match(part) for part in parts[:-1]):
        return Refusal(path, "test_file", not section.new)
    return None


def sections(patch: str) -> list[Section]:
    """Cut a patch as `git diff --no-renames` writes it into files, and read each one strictly."""
    lines = patch.split("\n")
    if lines and lines[-1] == "":
        lines.pop()
    found: list[Section] = []
    at = 0
    while at < len(lines):
        start = at
        at += 1
        section = Section([])
        if lines[start].startswith("diff --git "):
            at = _read(section, lines, start)
        else:
            section.problem = "not_a_patch"
        while at < len(lines) and not lines[at].startswith("diff --git "):  # garbage up to the next file
            section.problem = section.problem or "malformed_patch"
            at += 1
        section.lines = lines[start:at]
        found.append(section)
    return found


def _read(section: Section, lines: list[str], at: int) -> int:
    """Read one file's patch from its `diff --git` line on; returns where it ends."""
    names = {_both(lines[at].removeprefix("diff --git "))}
    at += 1
    while at < len(lines) and (match := MODE.match(lines[at])):
        if match[1] in section.modes:
            section.problem = "malformed_patch"
        section.modes[match[1]] = match[2]
        at += 1
    if at < len(lines) and (match := INDEX.match(lines[at])):
        if match[1]:
            section.modes["mode"] = match[1]
        at += 1
    if at + 1 < len(lines) and lines[at].startswith("--- ") and lines[at + 1].startswith("+++ "):
        for line, prefix, absent in (lines[at], "a/", "new file mode"), (lines[at + 1], "b/", "deleted file mode"):
            name = _name(line[4:].removesuffix("\t"))
            if name == "/dev/null" and absent in section.modes:
                continue
            names.add(name.removeprefix(prefix) if name and name.startswith(prefix) else None)
        at = _hunks(section, lines, at + 2)
    elif at < len(lines) and lines[at] == "GIT binary patch":
        at = _binary(section, lines, at + 1)
    elif at < len(lines) and lines[at].startswith("Binary files "):
        section.problem = "binary_without_content"
        at += 1
    if len(names) != 1 or None in names:
        section.problem = section.problem or "malformed_patch"
    section.path = next((name for name in names if name), "")
    return at


def _hunks(section: Section, lines: list[str], at: int) -> int:
    """Skip over hunks, counting their lines."""
    while at < len(lines) and (match := HUNK.match(lines[at])):
        old, new = (1 if count is None else int(count) for count in match.group(1, 3))
        at += 1
        while at < len(lines) and (old > 0 or new > 0 or lines[at].startswith("\\")):
            kind = lines[at][:1]
            if kind not in (" ", "+", "-", "\\"):
                break
            old -= kind in (" ", "-")
            new -= kind in (" ", "+")
            at += 1
        if old or new:
            section.problem = "malformed_patch"
            break
    return at


def _binary(section: Section, lines: list[str], at: int) -> int:
    """Skip over a binary patch: one or two blocks, each ended by an empty line."""
    for _ in range(2):
        if at >= len(lines) or not BINARY.match(lines[at]):
            break
        at += 1
        while at < len(lines) and ENCODED.match(lines[at]):
            at += 1
        if at < len(lines) and lines[at] == "":
            at += 1
        else:
            section.problem = "malformed_patch"
    return at


def _both(names: str) -> str | None:
    """The path in `a/PATH b/PATH`; None where the two differ."""
    if names.startswith('"'):
        end = _quote_end(names)
        first, second = _name(names[:end]), _name(names[end + 1 :])
    else:
        half = len(names) // 2
        first, second = names[:half], names[half + 1 :]
    if not first or not second or not first.startswith("a/") or not second.startswith("b/"):
        return None
    return first[2:] if first[2:] == second[2:] else None


def _quote_end(text: str) -> int:
    at = 1
    while at < len(text) and text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return at + 1


def _name(text: str) -> str | None:
    """A file name as git writes it, unquoted."""
    if not text.startswith('"'):
        return text
    if _quote_end(text) != len(text):
        return None
    out = bytearray()
    at = 1
    while at < len(text) - 1:
        if text[at] != "\\":
            out += text[at].encode("utf-8", "surrogateescape")
            at += 1
        elif text[at + 1] in ESCAPES:
            out.append(ESCAPES[text[at + 1]])
            at += 2
        elif re.match(r"[0-3][0-7]{2}", text[at + 1 : at + 4]):
            out.append(int(text[at + 1 : at + 4], 8))
            at += 4
        else:
            return None
    return out.decode("utf-8", "surrogateescape")
