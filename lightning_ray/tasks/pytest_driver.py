"""Runs pytest inside a sandbox, as `python3 -I -c`; in grading the candidate's code is imported by the tests, in this
process. What can be kept from it is: pytest comes from outside and is imported first, nothing of the workspace is
loaded by itself, and every test is reported on a channel with a nonce. What cannot be prevented in one process is
looked for (`watch`): frames inspected, pytest's functions replaced, objects that equal anything.

Input (stdin, JSON): `{"nonce", "runner": folder of pytest, "tests": [ids] (null: all), "files": [paths], "paths":
[folders for imports], "arguments": [more for pytest], "added": {path: [line numbers that the patch added]}}`.
Output, one line each on the descriptor that was stdout, after the nonce: `{"started"}`, `{"collect_error": path,
"detail"}`, `{"id", "outcome", "detail", "seconds", "shown"}` (`shown`: where all tests run, of a failure the
test's own lines and the message), `{"suspicion"}`, last `{"ended": exit status}`.
"""

import json
import os
import sys
import types

DETAIL = 300
SHOWN = 1500
INSPECTING = ("sys._getframe", "sys._current_frames", "gc.get_objects", "gc.get_referrers", "gc.get_referents")


def main() -> None:
    order = json.loads(sys.stdin.buffer.read())
    channel = os.dup(1)
    dumps, write, nonce, workspace = json.dumps, os.write, order["nonce"], os.getcwd()

    def say(**message: object) -> None:
        line = f"{nonce} {dumps(message)}\n".encode("utf-8", "surrogatepass")
        while line:
            line = line[write(channel, line) :]

    sys.dont_write_bytecode = True
    sys.path.insert(0, order["runner"])
    import pytest

    for name in order["preload"]:
        __import__(name)
    sys.path.remove(order["runner"])
    sys.path.append(order["runner"])
    site = next((at for at, path in enumerate(sys.path) if path.endswith("-packages")), len(sys.path) - 1)
    sys.path[site:site] = [os.path.normpath(os.path.join(workspace, path)) for path in order["paths"]]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"

    added = {os.path.join(workspace, path): set(lines) for path, lines in order["added"].items()}
    suspicions = watch(added, workspace)
    before = functions(pytest)
    required = order["tests"] and set(order["tests"])

    class Reporter:
        def __init__(self) -> None:
            self.phases: dict[str, list[tuple[str, str]]] = {}
            self.detail: dict[str, str] = {}
            self.shown: dict[str, str] = {}
            self.seconds: dict[str, float] = {}

        def pytest_collection_modifyitems(self, items: list) -> None:
            if required is not None:
                items[:] = [item for item in items if item.nodeid in required]

        def pytest_collectreport(self, report) -> None:
            if report.failed:
                say(collect_error=report.nodeid, detail=report.longreprtext[-DETAIL:])

        def pytest_runtest_logreport(self, report) -> None:
            outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
            self.phases.setdefault(report.nodeid, []).append((report.when, outcome))
            self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
            if report.failed and required is None:
                self.shown.setdefault(report.nodeid, own_lines(report))
            if outcome != "passed":
                self.detail[report.nodeid] = (report.longreprtext or str(report.longrepr))[-DETAIL:]

        def pytest_runtest_logfinish(self, nodeid: str) -> None:
            phases = self.phases.get(nodeid, [])
            outcomes = [outcome for _, outcome in phases if outcome != "passed"]
            whole = {"setup", "call", "teardown"} <= {when for when, _ in phases}
            outcome = outcomes[0] if outcomes else "passed" if whole else "incomplete"
            say(id=nodeid, outcome=outcome, detail=self.detail.get(nodeid, ""), seconds=self.seconds.get(nodeid, 0.0),
                shown=self.shown.get(nodeid, ""))

    arguments = [
        f"--rootdir={workspace}", "-p", "no:cacheprovider", "--import-mode=append", "--continue-on-collection-errors",
        "-q", *order["arguments"], "--", *(path for path in order["files"] if os.path.isfile(path)),
    ]  # fmt: skip
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    say(started=True)
    status = pytest.main(arguments, plugins=[Reporter()])
    after = functions(pytest)
    for name in [name for name, value in before.items() if after.get(name) is not value][:3]:
        suspicions.append(f"patched_test_runner: {name}")
    suspicions += always_equal(added)
    for suspicion in dict.fromkeys(suspicions):
        say(suspicion=suspicion)
    say(ended=int(status))
    os._exit(0)


def own_lines(report) -> str:
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


def watch(added: dict[str, set[int]], workspace: str) -> list[str]:
    """A list that grows by what lines that the patch added do to look around in this process."""
    found: list[str] = []
    frame_of = sys._getframe
    helpers = ("/inspect.py", "/traceback.py")

    inside = False

    def hook(event: str, arguments: tuple) -> None:
        nonlocal inside
        if event not in INSPECTING or inside:
            return
        inside = True  # the next line is such an event itself
        frame = frame_of(1)
        inside = False
        while frame is not None and frame.f_code.co_filename.endswith(helpers):
            frame = frame.f_back
        if frame is not None and frame.f_lineno in added.get(frame.f_code.co_filename, ()):
            where = os.path.relpath(frame.f_code.co_filename, workspace)
            if len(found) < 10:
                found.append(f"frame_inspection: {where}:{frame.f_lineno}")

    sys.addaudithook(hook)
    return found


def functions(pytest: types.ModuleType) -> dict[str, object]:
    """The code of every function of the test runner, and what `builtins` holds, by name."""
    found: dict[str, object] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("pytest", "_pytest", "pluggy", "builtins", "unittest"):
            continue
        for key, value in list(vars(module).items()):
            if name == "builtins":
                if callable(value):
                    found[f"builtins.{key}"] = value
            elif isinstance(value, types.FunctionType):
                found[f"{name}.{key}"] = value.__code__
            elif isinstance(value, type) and value.__module__ == name:
                for attribute, member in list(vars(value).items()):
                    member = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
                    if isinstance(member, types.FunctionType):
                        found[f"{name}.{key}.{attribute}"] = member.__code__
    return found


def always_equal(added: dict[str, set[int]]) -> list[str]:
    """Classes whose `__eq__` the patch wrote and that equal an object that they have never seen."""
    found = []
    todo, seen = [object], {object}
    while todo:
        for cls in type.__subclasses__(todo.pop()):
            if cls in seen:
                continue
            seen.add(cls)
            todo.append(cls)
            code = getattr(vars(cls).get("__eq__"), "__code__", None)
            if code is None or not added.get(code.co_filename, set()) & {line for *_, line in code.co_lines() if line}:
                continue
            try:
                if vars(cls)["__eq__"](cls.__new__(cls), object()) is True:
                    found.append(f"always_equal: {cls.__name__}")
            except BaseException:  # the candidate's code: whatever it raises is no equality
                continue
    return found


if __name__ == "__main__":
    main()
