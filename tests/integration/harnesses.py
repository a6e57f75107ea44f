"""Python harnesses that misbehave, for tests of worker processes and the runner. `settings["steps"]` says what to do:

`model` asks the model; `run: COMMAND` executes; anything else is the name of a way to end or to hang.
"""

import json
import os
import sys
import time
import urllib.request


def run(task, base_url, api_key, model, environment, settings):
    seen = []
    for step in settings["steps"]:
        if step == "model":
            body = json.dumps({"model": model, "messages": [{"role": "user", "content": f"{len(seen)}"}]}).encode()
            request = urllib.request.Request(f"{base_url}/v1/chat/completions", body,
                                             {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"})
            with urllib.request.urlopen(request) as answer:
                seen.append(json.load(answer)["choices"][0]["message"]["content"])
        elif step.startswith("run: "):
            seen.append(environment.execute(step.removeprefix("run: "), timeout=settings.get("timeout")))
        elif step.startswith("run in /tmp: "):
            seen.append(environment.execute(step.removeprefix("run in /tmp: "), cwd="/tmp", env={"FROM": "harness"}))
        elif step == "raise":
            raise RuntimeError("the harness broke")
        elif step == "exit":
            sys.exit("leaving")
        elif step == "return nothing":
            return None
        elif step == "give up":
            return {"exit_status": "LimitsExceeded", "ok": False, "detail": "too many steps"}
        elif step == "environment":
            seen.append(sorted(os.environ))
        elif step == "hold on":
            hold_on(environment)
        elif step == "die":
            os._exit(7)
    return {"exit_status": "Submitted", "ok": True, "log": json.dumps(seen)}


def hold_on(environment):
    """A thread that cannot be freed: it takes no refusal for an answer."""
    while True:
        try:
            environment.execute("sleep 1")
        except Exception:
            time.sleep(0.05)


def answer(task, base_url, api_key, model, environment, settings):
    """Asks the model once, with the task's statement. What it says takes the place of `a - b`."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": task["problem_statement"]}]}).encode()
    request = urllib.request.Request(f"{base_url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        said = json.load(response)["choices"][0]["message"]["content"]
    environment.execute(f"sed -i 's/a - b/{said}/' shop.py")
    return {"exit_status": "Submitted", "ok": True}
