"""`lightning-ray doctor`: what this machine can isolate, and whether a configuration's memory fits. Starts one sandbox,
loads no model.
"""

import json

from lightning_ray.config import Config, ConfigError
from lightning_ray.memory import GIB, Shape, advice, estimate, shape_of
from lightning_ray.sandbox.backend import choose
from lightning_ray.sandbox.base import SandboxUnavailable


def isolation_lines(config: Config) -> tuple[list[str], bool]:
    """The report of the sandbox that a run would get here, and whether it isolates as asked."""
    try:
        report = choose(config.sandbox).report
    except SandboxUnavailable as error:
        return [f"sandbox: none. {error}"], False
    shown = [f"  {name:13} {', '.join(map(str, value)) if isinstance(value, list) else value}"
             for name, value in report.items()]
    return ["sandbox", *shown], "unsafe" not in report


def memory_lines(config: Config, device_gib: float) -> tuple[list[str], bool]:
    """The table for one device, and whether it fits. Raises `ConfigError` where the model's config.json cannot be
    read."""
    if config.policy.path is None:
        return ["memory: the policy is made on the spot (policy.warm_start) and needs no table. For a model: "
                "--policy.path DIR"], True
    shape = _shape(config)
    found = estimate(shape, config)
    shown = [f"  {name:27} {size / GIB:8.2f} GiB" for name, size in found.parts.items() if size]
    faults = advice(found, config, int(device_gib * GIB))
    return [
        f"memory of one device ({shape.parameters / 1e9:.2f}e9 parameters, {config.policy.max_context:,} tokens of "
        f"context, {config.learner.ranks} ranks)", *shown, f"  {'total':27} {found.total / GIB:8.2f} GiB",
        f"  {'offloaded to the hosts':27} {found.host / GIB:8.2f} GiB",
        f"  KV cache {found.kv_bytes_per_token / 1024:.0f} KiB a token, {found.longest / GIB:.2f} GiB for one sequence "
        "of full length",
        *([f"does not fit: {faults[0]}", *(f"  {line}" for line in faults[1:])] if faults
          else [f"fits on devices of {device_gib:g} GiB"]),
    ], not faults


def _shape(config: Config) -> Shape:
    path = config.policy.path.expanduser() / "config.json"
    try:
        return shape_of(json.loads(path.read_text()))
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"policy.path: {path} cannot be read ({error}). The model's config.json is all that is "
                          "needed") from None
