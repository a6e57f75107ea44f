"""mini-SWE-agent, unchanged, on tasks whose commands take their time; and what it saw of its model.

Before each command of the policy the sandbox sleeps for as long as `settings["tools"]` (median and sigma of a
log-normal distribution, in seconds) gives for this rollout and turn: by name, so that every schedule has the same
times. Rollouts on held-out tasks do not sleep. `settings["log"]` is a file that gets a line of JSON for each answer,
command and end.
"""

import json
import math
import os
import random
import threading
import time

import litellm

from lightning_ray.harness import mini_swe_agent

TOOL_TIMEOUT_S = 120
_written: dict[str, int] = {}
"""Log file -> descriptor."""
_log_of: dict[str, str] = {}
"""Rollout -> its log."""
_requests: dict[str, int] = {}


def run(task, base_url, api_key, model, environment, settings):
    name, settings = threading.current_thread().name, dict(settings)
    _log_of[name], tools = settings.pop("log"), settings.pop("tools")
    _requests[name] = 0
    began = time.monotonic()
    try:
        return mini_swe_agent.run(task, base_url, api_key, model, Slow(environment, name, tools), settings)
    finally:
        note(name, "rollout", began, requests=_requests.pop(name))


class Slow:
    """The rollout's sandbox, in which each command begins with a pause."""

    def __init__(self, environment, name, tools):
        self._environment, self._name, self._turn = environment, name, 0
        self._median, self._sigma = (0.0, 0.0) if name.startswith("heldout") else tools

    def execute(self, command, cwd="", timeout=None, env=None):
        pause = 0.0
        if self._median:
            pause = random.Random(f"{self._name}/{self._turn}").lognormvariate(math.log(self._median), self._sigma)
            command = f"sleep {pause:.3f}\n{command}"
        self._turn += 1
        began = time.monotonic()
        try:
            return self._environment.execute(command, cwd=cwd, timeout=TOOL_TIMEOUT_S, env=env)
        finally:
            note(self._name, "tool", began, slept=pause)


def note(name, what, began, **more):
    path = _log_of[name]
    if path not in _written:
        _written[path] = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    line = {"rollout": name, "what": what, "began": began, "ended": time.monotonic(), **more}
    os.write(_written[path], (json.dumps(line) + "\n").encode())


def asked(request):
    _requests[threading.current_thread().name] += 1
    request.extensions["asked"] = time.monotonic()


def answered(response):
    response.read()
    tokens = response.json()["usage"]["completion_tokens"] if response.status_code == 200 else 0
    note(threading.current_thread().name, "answer", response.request.extensions["asked"], status=response.status_code,
         tokens=tokens)


litellm.client_session.event_hooks = {"request": [asked], "response": [answered]}
