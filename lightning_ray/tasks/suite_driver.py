"""Runs pytest inside a sandbox, as `python3 -I -c`, for `suite.py`.

Input (stdin, JSON): `{"nonce", "runner": folder of pytest, "files": [paths], "paths": [folders for imports],
"conftest": bool}`. Output: after the nonce, one JSON object a line: `{"id", "outcome", "seconds", "shown"}` for each
test, last `{"ended": exit status}`.
"""

import json
import os
import sys

SHOWN = 1500


def first_frame(report) -> str:
    """The part of a failure's traceback that lies in the test itself, and the message."""
    trace = getattr(report.longrepr, "reprtraceback", None)
    crash = getattr(report.longrepr, "reprcrash", None)
    if trace is None or not trace.reprentries:
        return str(report.longrepr)[-SHOWN:]
    lines = list(getattr(trace.reprentries[0], "lines", []))
    message = crash.message if crash is not None else ""
    if message and not any(line.startswith("E ") for line in lines):
        lines += [f"E       {line}" for line in message.split("\n")[:10]]
    return "\n".join(lines)[-SHOWN:]


def main() -> None:
    order = json.loads(sys.stdin.buffer.read())
    channel, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # what goes wrong is said on stderr, without the nonce
        os.dup2(null, descriptor)

    def say(**message):
        os.write(channel, f"{order['nonce']} {json.dumps(message)}\n".encode("utf-8", "backslashreplace"))

    sys.dont_write_bytecode = True
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    workspace = os.getcwd()
    sys.path.append(order["runner"])
    import pytest

    sys.path[:0] = [os.path.normpath(os.path.join(workspace, path)) for path in order["paths"]]

    class Reporter:
        def __init__(self):
            self.phases = {}

        def pytest_runtest_logreport(self, report):
            self.phases.setdefault(report.nodeid, []).append(report)

        def pytest_runtest_logfinish(self, nodeid):
            phases = self.phases.pop(nodeid, [])
            bad = next((report for report in phases if report.failed), None)
            odd = next((report for report in phases if not report.passed or hasattr(report, "wasxfail")), None)
            say(id=nodeid, outcome="failed" if bad else "skipped" if odd else "passed",
                seconds=sum(report.duration for report in phases), shown=first_frame(bad) if bad else "")

    options = [] if order["conftest"] else ["--noconftest"]
    status = pytest.main([
        f"--rootdir={workspace}", "-c", "/dev/null", "-p", "no:cacheprovider", "--import-mode=append",
        "--continue-on-collection-errors", "-q", "-o", "xfail_strict=false", *options, "--", *order["files"],
    ], plugins=[Reporter()])
    say(ended=int(status))


if __name__ == "__main__":
    main()
