"""Reinforcement learning on LLM agents with the deployed harness in the loop, unchanged. See README.md for the map."""

from lightning_ray.config import Config, ConfigError

__all__ = ["Config", "ConfigError", "Trainer"]


def __getattr__(name: str):
    """`Trainer` brings Ray with it, `Config` should stay cheap."""
    if name == "Trainer":
        from lightning_ray.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
