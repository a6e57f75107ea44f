"""Instances in SWE-bench's schema, made on the spot: one small module, in each instance another function broken, and
predictions of every kind with the verdict that is due.
"""

import difflib
import subprocess
from pathlib import Path
from typing import Any

RIGHT = {"add": "a + b", "scale": "a * b", "gap": "max(a, b) - min(a, b)", "ratio": "a / b", "least": "min(a, b)",
         "rest": "a % b", "mean": "(a + b) / 2", "most": "max(a, b)"}
WRONG = {"add": "a - b", "scale": "a + b", "gap": "a - b", "ratio": "a // b", "least": "max(a, b)", "rest": "a // b",
         "mean": "(a + b) / 3", "most": "min(a, b)"}
TESTS = "import unittest\nimport shop\n\n\nclass Tests(unittest.TestCase):\n" + "".join(
    f"    def test_{name}(self):\n        self.assertEqual(shop.{name}(3, 7), {eval(text, {'a': 3, 'b': 7})!r})\n\n"
    for name, text in RIGHT.items())
SCRIPT = """#!/bin/bash
set -uxo pipefail
cd /testbed
git config --global --add safe.directory /testbed
git apply -v - <<'EOF_TESTS'
{patch}EOF_TESTS
: '>>>>> Start Test Output'
timeout 60 python3 -m unittest -v tests.test_shop
: '>>>>> End Test Output'
rm -r tests
"""


def source(broken: str = "", **more: str) -> str:
    bodies = {**RIGHT, **({broken: WRONG[broken]} if broken else {}), **more}
    return "\n\n".join(f"def {name}(a, b):\n    return {text}\n" for name, text in bodies.items())


def patch(path: str, before: str, after: str, header: bool = True) -> str:
    old = f"a/{path}" if before else "/dev/null"
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), old, f"b/{path}")
    new = "" if before else "new file mode 100644\n"
    return (f"diff --git a/{path} b/{path}\n{new}" if header else "") + "".join(lines)


def test_name(function: str) -> str:
    return f"test_{function} (tests.test_shop.Tests.test_{function})"


def instance(broken: str, image: str = "none") -> dict[str, Any]:
    return {
        "instance_id": f"shop__shop-{broken}", "repo": f"shop/{'odd' if len(broken) % 2 else 'even'}",
        "base_commit": "0" * 40, "version": "1.0", "problem_statement": f"{broken}() is wrong.", "hints_text": "",
        "patch": patch("shop.py", source(broken), source()), "test_patch": patch("tests/test_shop.py", "", TESTS),
        "FAIL_TO_PASS": [test_name(broken)], "PASS_TO_PASS": [test_name(name) for name in RIGHT if name != broken],
        "image": image, "log_parser": "parse_log_django", "eval_type": "pass_and_fail",
        "eval_script": SCRIPT.format(patch=patch("tests/test_shop.py", "", TESTS)),
    }


def checkout(broken: str, place: Path) -> Path:
    """The repository of an instance, with one commit."""
    place.mkdir(parents=True)
    (place / "shop.py").write_text(source(broken))
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@a", "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=place, check=True)
    return place


def predictions() -> dict[str, tuple[str, str]]:
    """Broken function -> patch, and the verdict that it deserves."""
    def change(broken: str, header: bool = True, **bodies: str) -> str:
        return patch("shop.py", source(broken), source(broken, **bodies), header)

    return {
        "add": (change("add", add="a + b"), "resolved"),
        "scale": (change("scale", header=False, scale="b * a"), "resolved"),
        "gap": ("", "empty_patch"),
        "ratio": (change("ratio", ratio="b / a"), "unresolved"),
        "least": (patch("shop.py", "def other():\n    pass\n", "def other():\n    return 1\n"), "patch_rejected"),
        "rest": (change("rest", rest="a % b", add="a"), "unresolved"),
        "mean": (change("mean", mean="(a + b"), "unresolved"),
        "most": (change("most", most="max(a, b) if not __import__('time').sleep(999) else 0"), "timeout"),
    }
