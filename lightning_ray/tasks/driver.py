"""Calls the candidate's functions. Runs inside the grader's sandbox by `python3 -I -S -c`: it may import nothing but
the standard library, and knows arguments but no expected value. It starts in the workspace.

Input (stdin, JSON): `{"nonce", "module", "calls": [[id, function, args, kwargs], ...]}`.
Output, one line each on the descriptor that was stdout: `NONCE {"id": ..., "value": ...}` or `NONCE {"id": ...,
"error": ...}`, first `NONCE {"imported": true}` or `NONCE {"import_error": ...}`, last `NONCE {"ended": true}`.
The candidate's own stdout and stderr go to /dev/null.
"""

import importlib
import json
import os
import sys

LONGEST = 100_000


def main() -> None:
    order = json.loads(sys.stdin.buffer.read())
    channel = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    dumps, write, nonce = json.dumps, os.write, order["nonce"]

    def say(message: dict[str, object]) -> None:
        line = f"{nonce} {dumps(message)}\n".encode("utf-8", "surrogatepass")
        while line:
            line = line[write(channel, line) :]

    sys.path.insert(0, os.getcwd())
    sys.dont_write_bytecode = True
    try:
        module = importlib.import_module(order["module"])
    except BaseException as error:
        say({"import_error": describe(error)})
        return
    say({"imported": True})
    for name, function, args, kwargs in order["calls"]:
        try:
            value = getattr(module, function)(*args, **kwargs)
            text = dumps(value)
            if len(text) > LONGEST:
                raise ValueError(f"a result of {len(text)} characters")
            say({"id": name, "value": json.loads(text)})
        except BaseException as error:
            say({"id": name, "error": describe(error)})
    say({"ended": True})


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except BaseException:
        return type(error).__name__


if __name__ == "__main__":
    main()
