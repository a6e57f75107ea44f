"""A warm worker process: imports a Python harness once, then runs many rollouts of it, each in a thread of its own.

Started by `harness/pool.py` as `python -m lightning_ray.harness.worker FD MODULE:FUNCTION`, with one socket to its
runner and an environment that holds nothing of the user's. It executes no command of a model: `environment.execute`
asks the runner, which runs the command in the rollout's sandbox. Messages (`harness/frames.py`):

    to the worker    run {rollout, task, base_url, api_key, model, settings}, cancel {rollout},
                     executed {rollout, exec, output, returncode, timed_out} or {rollout, exec, error}
    to the runner    ready {}, failed {detail}, exec {rollout, exec, command, cwd, timeout, env},
                     result {rollout, exit_status, ok, detail, log, endpoint_failed}

When the connection ends, for whatever reason, the process ends at once.
"""

import importlib
import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lightning_ray.harness import frames
from lightning_ray.harness.spec import HarnessResult, split_entry

LOG_BYTES = 4000
"""How much of a traceback is kept with the result."""

CONNECTION_ERRORS = {"ConnectionError", "APIConnectionError", "TransportError"}
"""Of Python, of the SDKs of OpenAI and Anthropic, of httpx."""
TIMEOUTS = {"TimeoutError", "APITimeoutError", "TimeoutException"}

Harness = Callable[..., Any]


class ExecutionRefused(RuntimeError):
    """A command was not run: the rollout is over, or its sandbox failed. The harness should end."""


class SandboxEnvironment:
    """Where a Python harness executes commands: the rollout's sandbox, one blocking call at a time per thread."""

    def __init__(self, rollout_id: str, send: Callable[[frames.Message], None]) -> None:
        self._rollout_id = rollout_id
        self._send = send
        self._answers: dict[int, queue.SimpleQueue[frames.Message]] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._closed = ""

    def execute(self, command: str, cwd: str = "", timeout: float | None = None,
                env: dict[str, str] | None = None) -> dict[str, Any]:
        """Run `command` with bash in the sandbox; `cwd` defaults to the workspace, `timeout` (seconds) to the
        sandbox's. Returns `output` (stdout and stderr merged), `returncode` and `exception_info` (`timeout` where the
        command was killed for its time, else empty). Raises `ExecutionRefused`."""
        answer: queue.SimpleQueue[frames.Message] = queue.SimpleQueue()
        with self._lock:
            if self._closed:
                raise ExecutionRefused(self._closed)
            number = self._count
            self._count += 1
            self._answers[number] = answer
        self._send({"type": "exec", "rollout": self._rollout_id, "exec": number, "command": command, "cwd": cwd,
                    "timeout": timeout, "env": env or {}})
        message = answer.get()
        if "error" in message:
            raise ExecutionRefused(message["error"])
        return {"output": message["output"], "returncode": message["returncode"],
                "exception_info": "timeout" if message["timed_out"] else ""}

    def answer(self, message: frames.Message) -> None:
        with self._lock:
            waiting = self._answers.pop(message["exec"], None)
        if waiting is not None:
            waiting.put(message)

    def close(self, reason: str) -> None:
        """Refuse what waits and what comes."""
        with self._lock:
            self._closed = reason
            waiting, self._answers = self._answers, {}
        for answer in waiting.values():
            answer.put({"error": reason})


class Worker:
    """Answers the messages of one runner until the connection ends."""

    def __init__(self, connection: socket.socket, harness: Harness) -> None:
        self._connection = connection
        self._harness = harness
        self._sending = threading.Lock()
        self._environments: dict[str, SandboxEnvironment] = {}

    def send(self, message: frames.Message) -> None:
        data = frames.encode(message)
        with self._sending:
            self._connection.sendall(data)

    def serve(self) -> None:
        stream = self._connection.makefile("rb")
        while (message := frames.receive(stream)) is not None:
            rollout_id = message["rollout"]
            if message["type"] == "run":
                environment = SandboxEnvironment(rollout_id, self.send)
                self._environments[rollout_id] = environment
                threading.Thread(target=self._run, args=(message, environment), daemon=True, name=rollout_id).start()
                continue
            environment = self._environments.get(rollout_id)
            if environment is None:
                continue  # the rollout ended while the message was on its way
            if message["type"] == "executed":
                environment.answer(message)
            elif message["type"] == "cancel":
                environment.close("the rollout was cancelled")

    def _run(self, message: frames.Message, environment: SandboxEnvironment) -> None:
        try:
            result = HarnessResult.from_dict(self._harness(
                task=message["task"], base_url=message["base_url"], api_key=message["api_key"],
                model=message["model"], environment=environment, settings=message["settings"]))
        except (Exception, SystemExit) as error:  # a harness may fail in any way: that is a result
            result = HarnessResult(type(error).__name__, ok=False, detail=str(error)[:LOG_BYTES],
                                   log=traceback.format_exc()[-LOG_BYTES:], endpoint_failed=endpoint_failed(error))
        self._environments.pop(message["rollout"], None)
        self.send({"type": "result", "rollout": message["rollout"], **asdict(result)})


def endpoint_failed(error: BaseException | None) -> bool:
    """Whether an error began with a connection that was refused or broke off, or with an answer of 500 and above,
    whatever the libraries above made of it. A call that took too long is none: how long to wait is the harness's own
    decision."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    for link in reversed(chain):
        names = {cls.__name__ for cls in type(link).__mro__}
        if names & TIMEOUTS:
            return False
        if names & CONNECTION_ERRORS:
            return True
        status = getattr(link, "status_code", getattr(link, "code", None))  # SDKs; urllib
        if isinstance(status, int):
            return status >= 500
    return False


def load(entry: str) -> Harness:
    """The function that `module:function` names."""
    module, function = split_entry(entry)
    return getattr(importlib.import_module(module), function)


def main(descriptor: int, entry: str) -> None:
    connection = socket.socket(fileno=descriptor)
    try:
        harness = load(entry)
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        connection.sendall(frames.encode({"type": "failed", "detail": detail}))
        raise
    worker = Worker(connection, harness)
    worker.send({"type": "ready"})
    try:
        worker.serve()
    except (OSError, frames.FrameError):
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)  # threads that wait for a model would hold the interpreter back


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
