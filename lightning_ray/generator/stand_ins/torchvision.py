"""What stands in for torchvision where it is not installed: every name can be imported, none can be used.

vLLM's Qwen3.5 and transformers import torchvision with their image code even where a model reads text only. A use
raises ImportError. `generator/text_only.py` says where this module is found.
"""

import sys
from types import ModuleType
from typing import Any, NoReturn

MODULES = ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")

__version__ = "0"
__path__: list[str] = []


class _Name:
    """A name of torchvision's; so are its attributes."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> "_Name":
        return _named(self._name, attribute)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ImportError(f"{self._name} is needed, and torchvision is not installed: only text can be processed here")


def _named(owner: str, attribute: str) -> _Name:
    if attribute.startswith("__"):
        raise AttributeError(attribute)
    return _Name(f"{owner}.{attribute}")


class _Module(ModuleType):
    __path__ = ()

    def __getattr__(self, attribute: str) -> _Name:
        return _named(self.__name__, attribute)


def __getattr__(attribute: str) -> _Name:
    return _named(__name__, attribute)


for _path in MODULES:
    _module = sys.modules[f"{__name__}.{_path}"] = _Module(f"{__name__}.{_path}")
    _parent, _, _last = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _last, _module)
