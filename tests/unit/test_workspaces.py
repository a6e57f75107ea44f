"""Workspaces: exactly one commit and nothing besides, the same for the same content, whole under concurrency."""

import os
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ray.sandbox import pack
from lightning_ray.tasks.workspaces import Workspaces, check_name, checkout
from tests.sandboxes import FILES, make_task, running


def git(place: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-c", "safe.directory=*", *arguments], cwd=place, capture_output=True, check=True)
    assert done.stderr == b""
    return done.stdout.decode()


def check_repository(place: Path, files: dict[str, bytes]) -> None:
    assert git(place, "fsck", "--strict", "--full", "--no-dangling") == ""
    assert git(place, "status", "--porcelain", "--ignored") == ""
    assert git(place, "rev-list", "--all", "--count") == "1\n"
    assert git(place, "log", "--format=%an %ae %cn %ce %ad %s", "--date=iso-strict").rstrip() == (
        "workspace workspace@localhost workspace workspace@localhost 2020-01-01T00:00:00+00:00 workspace"
    )
    assert git(place, "remote") == git(place, "stash", "list") == git(place, "reflog") == git(place, "tag") == ""
    names = git(place, "ls-files", "-z").split("\0")[:-1]
    assert sorted(names) == sorted(files)
    for name, content in files.items():
        assert (place / name).read_bytes() == content
    assert not (place / ".git/hooks").exists() and not (place / ".git/logs").exists()


def test_files_become_a_repository_of_one_commit(tmp_path):
    place = Workspaces(tmp_path).prepare(make_task())
    check_repository(place, {name: text.encode() for name, text in FILES.items()})
    assert Workspaces(tmp_path).prepare(make_task(instance_id="another")) == place


name_part = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1, max_size=8)
paths = st.lists(name_part, min_size=1, max_size=3).map("/".join)


@settings(max_examples=10, deadline=None)
@given(st.dictionaries(paths, st.binary(max_size=50), max_size=8))
def test_any_files_make_a_sound_repository(files):
    try:
        for name in files:
            check_name(name, "x")
            assert len(name.encode()) < 200 and name.strip() and not name.endswith(".gitattributes")
        members = checkout(files)
    except (ValueError, AssertionError):
        return
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for name, content in members.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(content)
        assert git(place, "fsck", "--strict", "--full", "--no-dangling") == ""
        assert git(place, "status", "--porcelain") == ""
        assert git(place, "ls-files", "-z").split("\0")[:-1] == sorted(files, key=str.encode)


def test_the_repository_is_the_one_that_git_would_make(tmp_path):
    """The same tree and commit ids, whether written directly or by git."""
    source = tmp_path / "source"
    for name, text in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    workspaces = Workspaces(tmp_path / "made")
    direct, by_git = workspaces.prepare(make_task()), workspaces.prepare(make_task({}, directory=str(source)))
    assert git(direct, "rev-parse", "HEAD", "HEAD^{tree}") == git(by_git, "rev-parse", "HEAD", "HEAD^{tree}")


def test_a_directory_loses_its_history_and_keeps_its_files(tmp_path):
    source = tmp_path / "source"
    (source / "pkg").mkdir(parents=True)
    (source / "pkg/a.py").write_text("1\n")
    (source / "run.sh").write_text("x\n")
    (source / "run.sh").chmod(0o700)
    (source / "link").symlink_to("pkg/a.py")
    (source / ".gitignore").write_text("*.log\n")
    (source / "kept.log").write_text("ignored, but there\n")
    subprocess.run(
        "git init -q; git add -A; git -c user.name=x -c user.email=x@y commit -qm one; echo 2 > pkg/a.py;"
        "git -c user.name=x -c user.email=x@y commit -qam two; git remote add origin http://x; git tag v1; "
        "git stash list; echo '#!/bin/sh' > .git/hooks/post-checkout",
        shell=True, cwd=source, check=True,
    )  # fmt: skip
    place = Workspaces(tmp_path / "made").prepare(make_task({}, directory=str(source)))
    assert git(place, "rev-list", "--all", "--count") == "1\n"
    assert git(place, "remote") == git(place, "tag") == git(place, "reflog") == ""
    assert git(place, "status", "--porcelain") == ""
    assert (place / "pkg/a.py").read_text() == "2\n" and os.readlink(place / "link") == "pkg/a.py"
    assert (place / "kept.log").exists() and os.access(place / "run.sh", os.X_OK)
    objects = git(place, "cat-file", "--batch-all-objects", "--batch-check=%(objecttype)")
    assert objects.count("commit") == 1 and git(place, "fsck", "--unreachable") == ""


async def test_a_workspace_of_a_directory_works_in_a_sandbox(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.py").write_text("1\n")
    (source / "crlf.txt").write_bytes(b"a\r\nb\r\n")
    (source / ".gitattributes").write_text("* text=auto\n")
    place = Workspaces(tmp_path / "made").prepare(make_task({}, directory=str(source)))
    async with running(place) as sandbox:
        assert (await sandbox.exec("git status --porcelain; echo 2 > a.py", timeout_s=10)).output == ""
        patch = await sandbox.diff()
    assert patch.count("diff --git") == 1 and "+2" in patch


def test_a_changed_directory_is_a_new_workspace(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("1")
    first = Workspaces(tmp_path / "made").prepare(make_task({}, directory=str(source)))
    (source / "a").write_text("22")
    second = Workspaces(tmp_path / "made").prepare(make_task({}, directory=str(source)))
    assert first != second and (first / "a").read_text() == "1" and (second / "a").read_text() == "22"


def test_the_pack_beside_is_the_checkout(tmp_path):
    place = Workspaces(tmp_path).prepare(make_task())
    assert pack.packed_beside(place).read_bytes() == pack.pack(place)
    assert pack.read_repository(place) == pack.pack_repository(place) == pack.repository_beside(place).read_bytes()


def test_files_with_attributes_are_committed_by_git(tmp_path):
    files = {".gitattributes": "*.txt text eol=lf\n", "a.txt": "x\r\n"}
    place = Workspaces(tmp_path).prepare(make_task(files))
    assert git(place, "status", "--porcelain") == "" and git(place, "cat-file", "-p", "HEAD:a.txt") == "x\n"


def prepare(root: str) -> str:
    return str(Workspaces(Path(root)).prepare(make_task()))


def test_processes_that_prepare_the_same_task_at_once_agree(tmp_path):
    with ProcessPoolExecutor(4) as pool:
        places = set(pool.map(prepare, [str(tmp_path)] * 16))
    assert len(places) == 1
    check_repository(Path(places.pop()), {name: text.encode() for name, text in FILES.items()})
    assert not list(tmp_path.glob(".making-*"))


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../x", ".git/hooks/x", "a/.GIT/x", "", "a//b", "./a", "a\0b"]
)
def test_impossible_file_names_are_refused_with_the_task_named(tmp_path, name):
    with pytest.raises(ValueError, match="shop-1"):
        Workspaces(tmp_path).prepare(make_task({name: ""}))


def test_a_file_that_is_also_a_directory_is_refused(tmp_path):
    with pytest.raises(ValueError, match="both"):
        Workspaces(tmp_path).prepare(make_task({"a": "", "a/b": ""}))


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"files": {}}, "neither"),
        ({"files": {"a": ""}, "directory": "/tmp"}, "both"),
        ({"files": {}, "directory": "/no/such/place"}, "no directory /no/such/place"),
    ],
)
def test_a_task_without_a_workspace_is_refused(tmp_path, task, message):
    with pytest.raises(ValueError, match=message):
        Workspaces(tmp_path).prepare(make_task(**task))
