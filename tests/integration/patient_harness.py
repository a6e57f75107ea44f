"""A Python harness whose pace a test decides: it waits for policy versions between its calls.

`settings["versions"]` is a directory in which the test makes a file `N` when policy version N is published, and in
which this harness notes what it heard. A task's statement says how to behave: `quick` calls the model twice; `slow`
waits for another version before each further call; `patient` asks without a pause, streamed and not by turns, until
`PATIENCE` versions have passed, or half of them when it is run again. No call is ever made twice: an error of any
kind ends the rollout. By turns the rollouts of a task leave a patch that passes and one that does not.
"""

import json
import os
import time
from pathlib import Path

from openai import OpenAI

PATIENCE = 20


def run(task, base_url, api_key, model, environment, settings):
    versions = Path(settings["versions"])
    how, number = task["problem_statement"], turn(versions, task["instance_id"])
    ask = Asker(OpenAI(base_url=f"{base_url}/v1", api_key=api_key, max_retries=0), model, how)
    began = newest(versions)
    if how == "patient":
        end = began + (PATIENCE if number < 2 else PATIENCE // 2)
        while newest(versions) < end:
            ask(streamed=len(ask.heard) % 2 == 0, max_tokens=settings["long"])
    else:
        for wait in range(3 if how == "slow" else 2):
            while how == "slow" and newest(versions) < began + wait:
                time.sleep(0.02)
            ask(streamed=False, max_tokens=12)
    (versions / f"heard-{task['instance_id']}-{number}.json").write_text(json.dumps(ask.heard))
    environment.execute(f"printf 'def value():\\n    return {number % 2}\\n' > value.py")
    return {"exit_status": "Submitted", "ok": True}


class Asker:
    """One conversation after the other, each of one question."""

    def __init__(self, client, model, question):
        self.client, self.model, self.question = client, model, question
        self.heard = []

    def __call__(self, *, streamed, max_tokens):
        answer = self.client.chat.completions.create(
            model=self.model, max_tokens=max_tokens, stream=streamed,
            messages=[{"role": "user", "content": f"{self.question} {len(self.heard)}"}])
        if streamed:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
        else:
            text = answer.choices[0].message.content or ""
        self.heard.append(text)


def newest(versions):
    return max((int(path.name) for path in versions.iterdir() if path.name.isdigit()), default=0)


def turn(versions, task):
    """How many rollouts of the task began before this one."""
    number = 0
    while True:
        try:
            os.close(os.open(versions / f"began-{task}-{number}", os.O_CREAT | os.O_EXCL))
            return number
        except FileExistsError:
            number += 1
