"""mini-SWE-agent as a Python harness: its own agent, model and configuration classes, executing in our sandbox.

`harness.settings` is mini-SWE-agent's own configuration (`agent`, `model`, `environment`), merged over the files that
its key `config` names (its own configuration files by name, or paths; default `mini.yaml`, as its command line does).
Nothing of mini-SWE-agent is changed: this module fills in the endpoint, gives the agent an environment that executes in
the sandbox, and reads the exit status. Imported in warm worker processes only: the import costs seconds.

Settings of litellm made here, for cost alone: one connection pool for all rollouts of the process, and a price entry
for the policy's name, without which each call searches the whole price list twice.
"""

import functools
import logging
import platform
import shlex
import subprocess
from typing import Any

import httpx
import litellm
from minisweagent.agents import get_agent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment, LocalEnvironmentConfig
from minisweagent.models import get_model, get_model_class
from minisweagent.utils.serialize import recursive_merge
from pydantic import Field

from lightning_ray.sandbox.base import WORKSPACE

OK = "Submitted"
CALL_TIMEOUT_S = 600.0
"""How long one model call may take before its SDK gives up. The rollout's own clock is `harness.timeout_s`."""
HOSTNAME = "sandbox"

litellm.suppress_debug_info = True
litellm.client_session = httpx.Client(
    timeout=CALL_TIMEOUT_S, trust_env=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=64))
for _name in ("litellm", "litellm_textbased", "litellm_response"):
    get_model_class("", _name)  # import them now, not in the first rollout
logging.getLogger("LiteLLM").setLevel(logging.ERROR)


class SandboxEnvironmentConfig(LocalEnvironmentConfig):
    """mini-SWE-agent's own settings of a local environment, and the interpreter, as its Docker environment has it."""

    cwd: str = WORKSPACE
    interpreter: list[str] = Field(default=["bash", "-c"])
    """The command is appended to it."""


class SandboxedEnvironment(LocalEnvironment):
    """mini-SWE-agent's local environment, but commands run in the rollout's sandbox and nothing of this process is
    shown: template variables are its settings and the machine's kernel, as in its Docker environment."""

    def __init__(self, sandbox: Any, **settings: Any) -> None:
        super().__init__(config_class=SandboxEnvironmentConfig, **settings)
        self._sandbox = sandbox

    def execute(self, action: dict, cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Raises `Submitted` on the submission mark, and what the sandbox raises when the rollout is over."""
        command = action.get("command", "")
        limit = timeout or self.config.timeout
        result = self._sandbox.execute(self._shell(command), cwd=cwd or self.config.cwd, timeout=limit,
                                       env=self.config.env)
        if result["exception_info"]:
            error = subprocess.TimeoutExpired(command, limit)
            result |= {
                "returncode": -1,
                "exception_info": f"An error occurred while executing the command: {error}",
                "extra": {"exception_type": type(error).__name__, "exception": str(error)},
            }
        self._check_finished(result)
        return result

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        return recursive_merge(self.config.model_dump(), _system(), kwargs)

    def _shell(self, command: str) -> str:
        if self.config.interpreter == ["bash", "-c"]:
            return command  # the sandbox's own shell
        return f"exec {shlex.join([*self.config.interpreter, command])}"


def run(task: dict, base_url: str, api_key: str, model: str, environment: Any, settings: dict) -> dict:
    """One rollout: mini-SWE-agent on `task["problem_statement"]`. Returns `exit_status` and `ok` (submitted). An
    exception of the agent (a model call that failed for good) propagates: its name is the exit status."""
    config = configuration(base_url, api_key, model, settings)
    _register(config["model"]["model_name"])
    environment_settings = dict(config.get("environment", {}))
    environment_settings.pop("environment_class", None)  # its commands run in the sandbox, whatever class that names
    agent = get_agent(get_model(config=config["model"]), SandboxedEnvironment(environment, **environment_settings),
                      config.get("agent", {}), default_type="default")
    info = agent.run(task["problem_statement"])
    status = info.get("exit_status", "")
    detail = "" if status == OK else str(agent.messages[-1]["content"])
    return {"exit_status": status, "ok": status == OK, "detail": detail}


def configuration(base_url: str, api_key: str, model: str, settings: dict) -> dict[str, Any]:
    """mini-SWE-agent's configuration: its files, then `settings`, then the endpoint."""
    files = settings.get("config", "mini.yaml")
    own = {key: value for key, value in settings.items() if key != "config"}
    return recursive_merge(
        *[_config_file(name) for name in ([files] if isinstance(files, str) else files)],
        {"model": {"model_name": f"openai/{model}", "cost_tracking": "ignore_errors",
                   "model_kwargs": {"timeout": CALL_TIMEOUT_S}}},
        own,
        {"model": {"model_kwargs": {"api_base": f"{base_url}/v1", "api_key": api_key}}},
    )


@functools.cache
def _config_file(name: str) -> dict[str, Any]:
    return get_config_from_spec(name)


@functools.cache
def _register(model_name: str) -> None:
    price = {"litellm_provider": "openai", "mode": "chat", "input_cost_per_token": 0.0, "output_cost_per_token": 0.0,
             "cache_creation_input_token_cost": 0.0, "cache_read_input_token_cost": 0.0}
    litellm.register_model({name: price for name in {model_name, model_name.partition("/")[2] or model_name}})


@functools.cache
def _system() -> dict[str, str]:
    return platform.uname()._asdict() | {"node": HOSTNAME}
