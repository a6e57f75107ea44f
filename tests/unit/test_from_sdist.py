"""Tasks from source packages: what is read of an archive, and what the runs of a bug say."""

import io
import subprocess
import tarfile

import pytest

from lightning_ray.config import ConfigError
from lightning_ray.tasks import from_sdist, patches
from lightning_ray.tasks.from_sdist import bugs, failure_of, judge, sort_out, unpack
from lightning_ray.tasks.statements import Plain, checked
from lightning_ray.tasks.suite import SuiteRun

SOURCE = '''\
def total(prices):
    result = 0
    for price in prices:
        if price > 0:
            result = result + price
    return result


def untested(value):
    return value * 2
'''
TESTS = '''\
import pytest
from shop import total
from helper import PRICES


@pytest.mark.parametrize("more", [1, 2])
def test_adds(more):
    assert total([*PRICES, more]) == 3 + more


def test_nothing():
    assert total([]) == 0
'''
MEMBERS = {"shop/__init__.py": SOURCE, "tests/test_shop.py": TESTS, "tests/helper.py": "PRICES = [3, -1]\n",
           "setup.py": "def setup(): return 1 + 1\n", "docs/conf.py": "x = 1\n", "shop.egg-info/PKG-INFO": "x\n"}


def archive(directory, members=MEMBERS, requirement="shop==1.0"):
    place = directory / requirement
    place.mkdir(parents=True)
    with tarfile.open(place / "sdist.tar.gz", "w:gz") as packed:
        for name, text in members.items():
            item = tarfile.TarInfo(f"sdist/{name}")
            item.size = len(text.encode())
            packed.addfile(item, io.BytesIO(text.encode()))
    return place / "sdist.tar.gz"


def run(passed, failed=(), seconds=0.1):
    names = [*passed, *failed]
    return SuiteRun({**dict.fromkeys(passed, "passed"), **dict.fromkeys(failed, "failed")},
                    dict.fromkeys(names, seconds), {name: f"> {name}" for name in failed}, ended=True, output="")


def test_the_agent_sees_the_source_and_no_tests(tmp_path):
    package = unpack(archive(tmp_path), "shop==1.0")
    assert sorted(package.files) == ["setup.py", "shop/__init__.py"]
    assert sorted(package.tests) == ["tests/helper.py", "tests/test_shop.py"]
    assert package.suite == ["tests/test_shop.py"] and package.paths == [".", "src", "tests"]
    assert package.sources == ["shop/__init__.py"] and not package.conftest


def test_paths_that_lead_out_of_the_archive_are_left_out(tmp_path):
    package = unpack(archive(tmp_path, {**MEMBERS, "../../evil.py": "x = 1\n"}), "shop==1.0")
    assert not any("evil" in path for path in [*package.files, *package.tests])


@pytest.mark.parametrize("missing", ["tests/test_shop.py", "shop/__init__.py"])
def test_packages_that_are_of_no_use_are_refused(tmp_path, missing):
    with pytest.raises(ConfigError, match=r"shop==1.0 (ships no test|holds no Python)"):
        unpack(archive(tmp_path, {name: text for name, text in MEMBERS.items() if name != missing}), "shop==1.0")


def test_a_patch_applies_and_reverses_with_git(tmp_path):
    package = unpack(archive(tmp_path), "shop==1.0")
    for path, mutation in bugs(package, 100, 0):
        after = mutation.apply(SOURCE)
        patch = patches.git_patch(path, SOURCE, after)
        assert patches.touched(patch) == {"shop/__init__.py"}
        file = tmp_path / "tree" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(after)
        subprocess.run(["git", "apply", "-R", "-"], input=patch, text=True, check=True, cwd=tmp_path / "tree")
        assert file.read_text() == SOURCE


def test_bugs_are_seeded_and_spread_over_functions(tmp_path):
    package = unpack(archive(tmp_path), "shop==1.0")
    assert bugs(package, 2, 1) == bugs(package, 2, 1)
    assert {mutation.function for _, mutation in bugs(package, 2, 1)} == {"total", "untested"}


def test_slow_and_flaky_tests_are_no_measure():
    first = SuiteRun(dict.fromkeys("abcd", "passed"), {"a": 0.1, "b": 9.0, "c": 0.1, "d": 0.1}, {}, True, "")
    good, kinds = sort_out(first, run(["a", "b", "c"], failed=["d", "e"]))
    assert good == {"a", "c"} and kinds == {"stable": 2, "slow": 1, "flaky": 1, "failing": 1}


@pytest.mark.parametrize(("first", "second", "verdict"), [
    (run("ab", "c"), run("ab", "c"), (["c"], ["a", "b"])),
    (run("a"), run("a"), (["b", "c"], ["a"])),
    (run("abc"), run("abc"), "survived"),
    (run(""), run(""), "breaks_all"),
    (run("ab", "c"), run("a", "bc"), "flaky"),
    (run("ab", "c"), run("abc"), "flaky"),
])
def test_what_the_runs_of_a_bug_say(first, second, verdict):
    assert judge(set("abc"), first, second) == verdict


async def test_the_statement_shows_the_failure_and_not_the_place(tmp_path):
    package = unpack(archive(tmp_path), "shop==1.0")
    text = await Plain().write(failure_of(package, ["t::c"], ["t::a"], run(["t::a"], ["t::c"])))
    assert "> t::c" in text and "1 of its 2 checks" in text and "__init__" not in text


@pytest.mark.parametrize(("answer", "statement"), [
    ("<think>\nhm\n</think>\n\ntotal() is wrong\n", "total() is wrong"), ("", None), (None, None),
    ("<think>a</think> ", None),
])
def test_thoughts_are_no_statement(answer, statement):
    assert checked(answer) == statement


@pytest.mark.parametrize("bad", ["inflection", "a==1; rm", "-r==1", "a==../1"])
def test_bad_requirements_are_refused(bad, tmp_path):
    with pytest.raises(ConfigError, match="NAME==VERSION"):
        from_sdist.download(bad, tmp_path)
