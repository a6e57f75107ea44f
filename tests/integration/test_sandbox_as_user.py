"""The sandbox for an ordinary user: where the tests run as root, they run its red team once more as nobody.

What the interpreter needs may lie below directories that nobody may enter (a 0700 home); a private mount namespace
then shows these directories with nothing else in them.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

NOBODY = 65534
ROOT = Path(__file__).parents[2]
TESTS = ["tests/redteam/test_escapes.py", "tests/unit/test_sandbox_backend.py"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the other tests already run as an ordinary user")


def closed(path: Path) -> Path | None:
    """The highest directory on the way to `path` that others may not enter."""
    return next((above for above in reversed(path.parents) if not above.stat().st_mode & 0o001), None)


def opened(paths: list[Path]) -> str:
    """Shell commands that make `paths` reachable for everyone in a private mount namespace."""
    lines = ["mount --make-rprivate /", "mount -t tmpfs -o mode=755 staging /mnt"]
    hidden = {path: above for path in paths if (above := closed(path))}
    for number, path in enumerate(hidden):
        lines += [f"mkdir /mnt/{number}", f"mount --rbind {shlex.quote(str(path))} /mnt/{number}"]
    lines += [f"mount -t tmpfs -o mode=755 open {shlex.quote(str(above))}" for above in sorted(set(hidden.values()))]
    for number, path in enumerate(hidden):
        lines += [f"mkdir -p {shlex.quote(str(path))}", f"mount --rbind /mnt/{number} {shlex.quote(str(path))}"]
    return " && ".join(lines)


def test_everything_holds_for_an_ordinary_user():
    home = tempfile.mkdtemp(prefix="as-nobody-")
    try:
        os.chown(home, NOBODY, NOBODY)
        environment = {"HOME": f"{home}/home", "TMPDIR": home, "PATH": os.defpath, "PYTHONPATH": str(ROOT),
                       "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
        run = ["setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "env", "-i",
               *[f"{name}={value}" for name, value in environment.items()],
               sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS]  # fmt: skip
        reachable = opened([Path(sys.base_prefix), Path(sys.prefix), ROOT])
        script = f"{reachable} && cd {shlex.quote(str(ROOT))} && exec {shlex.join(run)}"
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    finally:
        shutil.rmtree(home, ignore_errors=True)
