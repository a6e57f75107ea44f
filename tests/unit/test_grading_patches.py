"""The filter of agents' patches: what is let in is what git applies, all else is refused with a reason."""

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ray.tasks.patches import FILE_BYTES, filter_patch, sections, touched

GIT = ["git", "-c", "core.quotePath=false", "-c", "user.name=x", "-c", "user.email=x@y"]
DIFF = [*GIT, "diff", "--cached", "--binary", "--full-index", "--no-renames", "HEAD"]


def real_diff(before: dict[str, bytes], after: dict[str, bytes], links: dict[str, str] | None = None) -> str:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        write(place, before)
        subprocess.run([*GIT, "init", "-q"], cwd=place, check=True)
        subprocess.run([*GIT, "add", "-A", "-f"], cwd=place, check=True)
        subprocess.run([*GIT, "commit", "-q", "--allow-empty", "-m", "x"], cwd=place, check=True)
        for name in before:
            (place / name).unlink()
        write(place, after)
        for name, target in (links or {}).items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).symlink_to(target)
        subprocess.run([*GIT, "add", "-A", "-f"], cwd=place, check=True)
        done = subprocess.run(DIFF, cwd=place, check=True, capture_output=True)
        return done.stdout.decode("utf-8", "surrogateescape")


def write(place: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)


def new_file(name: str, content: str = "x\n", mode: str = "100644") -> str:
    lines = content.split("\n")[:-1]
    body = "".join(f"+{line}\n" for line in lines)
    quoted = f"a/{name} b/{name}"
    return (
        f"diff --git {quoted}\nnew file mode {mode}\nindex {'0' * 40}..{'1' * 40}\n--- /dev/null\n+++ b/{name}\n"
        f"@@ -0,0 +1,{len(lines)} @@\n{body}"
    )


def changed(name: str, old: str = "a", new: str = "b") -> str:
    return (
        f"diff --git a/{name} b/{name}\nindex {'0' * 40}..{'1' * 40} 100644\n--- a/{name}\n+++ b/{name}\n"
        f"@@ -1 +1 @@\n-{old}\n+{new}\n"
    )


def outcome(patch: str, **more) -> tuple[list[str], list[tuple[str, str, bool]]]:
    result = filter_patch(patch, **more)
    return result.paths, [(each.path, each.reason, each.suspicious) for each in result.refusals]


def test_an_everyday_patch_is_let_in_unchanged():
    before = {"a.py": b"1\n2\n3\n" * 20, "gone.py": b"x\n", "dir/b.txt": b"no newline"}
    after = {"a.py": b"1\n2\n4\n" * 20, "dir/b.txt": b"no newline\nadded", "new one.py": b""}
    after["data.bin"] = b"\0\1\2\xff" * 99
    patch = real_diff(before, after)
    result = filter_patch(patch)
    assert result.patch == patch and not result.refusals
    assert sorted(result.paths) == ["a.py", "data.bin", "dir/b.txt", "gone.py", "new one.py"]


names = st.lists(
    st.text(st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1, max_size=6),
    min_size=1, max_size=2,
).map("/".join)  # fmt: skip
contents = st.one_of(
    st.binary(max_size=60),
    st.lists(
        st.sampled_from(
            ["diff --git a/x b/x", "--- a/x", "+++ b/x", "@@ -1 +1 @@", "", "-x", "\\ No newline", "GIT binary patch"]
        ),
        max_size=6,
    ).map(lambda lines: "\n".join(lines).encode()),
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(names, contents, max_size=4), st.dictionaries(names, contents, max_size=4))
def test_whatever_git_writes_is_read_to_the_line(before, after):
    def usable(files):
        parts = [name.split("/") for name in files]
        if not all({".", ".."}.isdisjoint(each) and not any(".git" in part.lower() for part in each) for each in parts):
            return False
        folders = {each[0] for each in parts if len(each) > 1}
        return not any(len(each) == 1 and each[0] in folders for each in parts)

    if not usable(before) or not usable({**before, **after}):
        return
    patch = real_diff(before, after)
    found = sections(patch)
    assert not [section.problem for section in found if section.problem]
    assert "".join("\n".join(section.lines) + "\n" for section in found) == patch
    assert {section.path for section in found} == {
        name for name in {**before, **after} if before.get(name) != after.get(name)
    }


@pytest.mark.parametrize(
    ("patch", "reason", "suspicious"),
    [
        (new_file("link", "/etc/passwd\n", "120000"), "not_a_regular_file", True),
        (new_file("module", "Subproject commit 1\n", "160000"), "not_a_regular_file", True),
        (changed("link").replace("100644", "120000"), "not_a_regular_file", True),
        (new_file("../escape.py"), "outside_the_workspace", True),
        (new_file("a/../../escape.py"), "outside_the_workspace", True),
        (new_file("/etc/cron.d/x"), "outside_the_workspace", True),
        (new_file("a//b.py"), "outside_the_workspace", True),
        (new_file(".git/hooks/post-checkout"), "git_directory", True),
        (new_file("sub/.GIT/config"), "git_directory", True),
        (new_file(".git./config"), "git_directory", True),
        (new_file("git~1/config"), "git_directory", True),
        (new_file("x.pth"), "loaded_by_itself", True),
        (new_file("lib/sitecustomize.py"), "loaded_by_itself", True),
        (new_file("usercustomize.py"), "loaded_by_itself", True),
        (new_file("conftest.py"), "loaded_by_itself", True),
        (new_file("pkg/ConfTest.py"), "loaded_by_itself", True),
        (new_file("pytest.ini"), "loaded_by_itself", True),
        (new_file(".pytest.ini"), "loaded_by_itself", True),
        (new_file("tox.ini"), "loaded_by_itself", True),
        (changed("setup.cfg"), "loaded_by_itself", True),
        (changed("pyproject.toml"), "loaded_by_itself", True),
        (changed("setup.py"), "loaded_by_itself", True),
        (changed("tests/test_shop.py"), "test_file", True),
        (changed("test_shop.py"), "test_file", True),
        (changed("pkg/shop_test.py"), "test_file", True),
        (changed("src/app.test.ts"), "test_file", True),
        (changed("testing/helpers.py"), "test_file", True),
        (new_file("test_mine.py"), "test_file", False),
        (new_file("__pycache__/shop.cpython-311.pyc"), "compiled_python", False),
        (new_file("shop.pyc"), "compiled_python", False),
        (new_file("shop.egg-info/entry_points.txt"), "package_metadata", False),
        (new_file("shop-1.dist-info/METADATA"), "package_metadata", False),
        (new_file("big.txt", "x" * FILE_BYTES + "\n"), "file_too_large", False),
        ("diff --git a/x b/x\nBinary files a/x and b/x differ\n", "binary_without_content", True),
        ("diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n", "malformed_patch", True),
        (changed("shop.py").replace("+++ b/shop.py", "+++ b/conftest.py"), "malformed_patch", True),
        (changed("shop.py").replace("--- a/shop.py", "--- a/../x"), "malformed_patch", True),
        (changed("shop.py") + "+one line too many\n", "malformed_patch", True),
        (changed("shop.py").replace("@@ -1 +1 @@", "@@ -1 +1,9 @@"), "malformed_patch", True),
        ("just text\n", "not_a_patch", True),
        ("--- a/conftest.py\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+x\n", "not_a_patch", True),
    ],
)
def test_what_is_refused_and_why(patch, reason, suspicious):
    good = changed("good.py")
    paths, refusals = outcome(good + patch if patch.startswith("diff") else patch + good)
    assert paths == ["good.py"]
    assert [(each[1], each[2]) for each in refusals] == [(reason, suspicious)]


def test_what_the_solution_touches_may_be_touched():
    patch = changed("setup.cfg") + changed("tests/test_shop.py") + new_file("conftest.py")
    assert outcome(patch, solution={"setup.cfg", "tests/test_shop.py", "conftest.py"}) == (
        ["setup.cfg", "tests/test_shop.py", "conftest.py"], [],
    )  # fmt: skip
    assert outcome(new_file("link", "x\n", "120000"), solution={"link"})[0] == []


def test_test_files_that_the_grader_brings_are_refused_in_any_case():
    paths, refusals = outcome(new_file("odd_name.py"), solution={"odd_name.py"}, hidden={"odd_name.py"})
    assert paths == [] and refusals == [("odd_name.py", "test_file", True)]


def test_a_file_that_is_patched_twice_is_let_in_once():
    paths, refusals = outcome(changed("a.py") + changed("a.py", "b", "c"))
    assert paths == ["a.py"] and refusals == [("a.py", "patched_twice", True)]


def test_symbolic_links_of_real_diffs_are_refused():
    patch = real_diff({"a.py": b"1\n"}, {"a.py": b"2\n"}, {"link": "/etc/passwd", "d/up": "../.."})
    paths, refusals = outcome(patch)
    assert paths == ["a.py"] and [each[1] for each in refusals] == ["not_a_regular_file"] * 2


def test_a_hunk_cannot_hide_another_file():
    """Lines inside a hunk that look like a header are content, and a header outside is read as one."""
    hiding = changed("a.py", "diff --git a/conftest.py b/conftest.py", "--- a/conftest.py")
    assert filter_patch(hiding).paths == ["a.py"]
    paths, refusals = outcome(changed("a.py") + new_file("conftest.py"))
    assert paths == ["a.py"] and refusals[0][0] == "conftest.py"


VALID = (changed("x.py", "x", "y") + new_file("conftest.py") + changed("x.py", "y", "z")).split("\n")[:-1]
LINES = [*VALID, "rename to conftest.py", "GIT binary patch", "literal 3", "zcmZ", "", "--- a/conftest.py",
         "@@ -1 +0,0 @@"]
EDITS = st.tuples(st.sampled_from(["insert", "delete", "replace"]), st.integers(0, 40), st.sampled_from(LINES))


@settings(max_examples=150, deadline=None)
@given(st.lists(EDITS, max_size=4))
def test_what_is_let_in_touches_only_what_it_says(edits):
    """However a patch is mangled, git applied to what is let in changes no file but those in `paths`."""
    lines = list(VALID)
    for kind, at, line in edits:
        at %= len(lines)
        lines[at : at + (kind != "insert")] = [] if kind == "delete" else [line]
    result = filter_patch("\n".join(lines) + "\n")
    if not result.patch:
        return
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        write(place, {"x.py": b"x\n", "conftest.py": b"x\n"})
        subprocess.run(["git", "apply", "-"], input=result.patch.encode(), cwd=place, capture_output=True, check=False)
        touched_names = {
            name for name in os.listdir(place)
            if name not in ("x.py", "conftest.py") or (place / name).read_bytes() != b"x\n"
        } | ({"x.py", "conftest.py"} - set(os.listdir(place)))  # fmt: skip
    assert touched_names <= set(result.paths) and "conftest.py" not in touched_names


def test_touched_lists_the_paths_of_a_patch():
    assert touched(changed("a.py") + new_file("b/c.py")) == {"a.py", "b/c.py"}
    assert touched("") == set()
