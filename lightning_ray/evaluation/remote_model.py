"""A model behind an OpenAI-compatible URL, in the place of our own generators and proxies: for evaluations only.

The harness talks to the URL itself, so nothing of its calls is recorded: rollouts have a patch and a grade, no tokens.
Only a Python harness can be used: what runs in a sandbox reaches no network. The key stays outside the sandbox.
"""

import argparse
import os
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle

from lightning_ray.config import Config, ConfigError
from lightning_ray.harness.spec import API_KEY
from lightning_ray.proxy.endpoint import Endpoint, OpenRollout, Status
from lightning_ray.trajectory.call import Call


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """Raises `ConfigError` for a URL of another form."""

    url: str
    """Ends with /v1."""
    name: str
    """As the server knows it."""
    api_key: str = field(default=API_KEY, repr=False)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")) or not self.url.rstrip("/").endswith("/v1"):
            raise ConfigError(f"--url: {self.url!r} is not understood. Write http://HOST:PORT/v1")

    @property
    def base_url(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


def add_options(parser: argparse.ArgumentParser) -> None:
    """How a command line names a remote model; `given` reads it."""
    parser.add_argument("--url", help="a model behind an OpenAI-compatible URL (http://HOST:PORT/v1), instead of the "
                        "configuration's policy")
    parser.add_argument("--model", metavar="NAME", help="its name there")
    parser.add_argument("--key-env", default="OPENAI_API_KEY", metavar="VARIABLE", help="its key (%(default)s)")


def given(options: argparse.Namespace) -> RemoteModel | None:
    """Raises `ConfigError` where one of the two was given without the other."""
    if (options.url is None) != (options.model is None):
        raise ConfigError("--url and --model: one was given without the other. Give the endpoint (http://HOST:PORT/v1) "
                          "and the name of its model, or neither for the configuration's policy")
    return RemoteModel(options.url, options.model, os.environ.get(options.key_env) or API_KEY) if options.url else None


def configured(config: Config, remote: RemoteModel) -> Config:
    """The configuration of an evaluation of `remote`: its name, and the sampling that the harness itself must ask its
    server for (`harness.settings.model.model_kwargs`, as mini-SWE-agent has it; what is given there stays)."""
    if config.harness.kind != "python":
        raise ConfigError("harness.kind: a command harness runs in a sandbox, which reaches no URL. Take a Python one")
    settings = dict(config.harness.settings)
    model = dict(settings.get("model", {}))
    sampling = {"temperature": config.evaluation.temperature, "max_tokens": config.sampling.max_tokens}
    model["model_kwargs"] = {**sampling, **model.get("model_kwargs", {})}
    return config.model_copy(update={
        "policy": config.policy.model_copy(update={"name": remote.name}),
        "harness": config.harness.model_copy(update={"settings": {**settings, "model": model}})})


@ray.remote
class RemoteEndpoint:
    """What a runner takes for its proxy."""

    def __init__(self, remote: RemoteModel) -> None:
        self._endpoint = Endpoint(remote.base_url, remote.api_key)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def open(self, rollout: OpenRollout) -> Endpoint:
        return self._endpoint

    async def finish(self, rollout_id: str) -> list[Call]:
        return []

    async def abandon(self, names: list[str]) -> int:
        return 0

    async def status(self, rollout_id: str) -> Status:
        return Status()


def remote_endpoint(remote: RemoteModel, number: int, place: dict[str, Any]) -> ActorHandle:
    """For `fleet.Fleet.beside`."""
    return RemoteEndpoint.options(**place).remote(remote)
