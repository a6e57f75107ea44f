"""harness/worker.py: which errors of a harness are its endpoint's, and its environment without a runner."""

import threading
import urllib.error
from email.message import Message

import httpx
import openai
import pytest

from lightning_ray.harness.worker import ExecutionRefused, SandboxEnvironment, endpoint_failed

REQUEST = httpx.Request("POST", "http://127.0.0.1:9/v1")


def raised(*errors: BaseException) -> BaseException:
    """The last of `errors`, each raised while the one before was handled."""
    context = None
    for error in errors:
        error.__context__ = context
        context = error
    return errors[-1]


def status_error(cls: type[openai.APIStatusError], status: int) -> openai.APIStatusError:
    return cls("x", response=httpx.Response(status, request=REQUEST), body=None)


@pytest.mark.parametrize("error", [
    ConnectionRefusedError(111, "refused"),
    openai.APIConnectionError(request=REQUEST),
    raised(httpx.RemoteProtocolError("cut off"), openai.APIConnectionError(request=REQUEST), RuntimeError("no model")),
    raised(ConnectionResetError(104, "reset"), ValueError("x"), KeyError("y")),
    status_error(openai.InternalServerError, 500),
    raised(status_error(openai.InternalServerError, 503), RuntimeError("no model")),
    urllib.error.HTTPError("http://x", 502, "bad", Message(), None),
])
def test_law8_an_endpoint_that_failed_is_found_below_what_libraries_made_of_it(error):
    assert endpoint_failed(error)


@pytest.mark.parametrize("error", [
    None, RuntimeError("x"), TimeoutError(), openai.APITimeoutError(request=REQUEST),
    raised(httpx.ReadTimeout("slow"), RuntimeError("x")),
    status_error(openai.NotFoundError, 404), status_error(openai.RateLimitError, 429),
    raised(status_error(openai.PermissionDeniedError, 403), status_error(openai.InternalServerError, 500)),
])
def test_other_errors_are_the_harnesss_own(error):
    assert not endpoint_failed(error)


def test_errors_in_a_circle_end():
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__context__, second.__context__ = second, first
    assert not endpoint_failed(first)


def test_a_closed_environment_refuses_what_waits_and_what_comes():
    sent = []
    environment = SandboxEnvironment("r", sent.append)
    refused = []

    def wait():
        try:
            environment.execute("sleep 60")
        except ExecutionRefused as error:
            refused.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while not sent:
        pass
    environment.close("over")
    thread.join(5)
    assert refused == ["over"]
    with pytest.raises(ExecutionRefused, match="over"):
        environment.execute("true")
    assert len(sent) == 1


def test_an_answer_reaches_its_own_command():
    sent = []

    def send(message):
        sent.append(message)
        environment.answer({"exec": 99, "output": "not this", "returncode": 0, "timed_out": False})
        environment.answer({"exec": message["exec"], "output": message["command"], "returncode": 3, "timed_out": True})

    environment = SandboxEnvironment("r", send)
    assert environment.execute("one", cwd="/tmp", timeout=2, env={"A": "b"}) == {
        "output": "one", "returncode": 3, "exception_info": "timeout"}
    assert environment.execute("two")["output"] == "two"
    assert sent[0] == {"type": "exec", "rollout": "r", "exec": 0, "command": "one", "cwd": "/tmp", "timeout": 2,
                       "env": {"A": "b"}}
