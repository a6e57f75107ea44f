"""vLLM without torchvision: architectures such as Qwen3.5 import it although they are used for text only.

The CPU installation leaves torchvision out (`.ci/overrides.txt` says why). Where it is missing, `allow_text_only`
makes `stand_ins/torchvision.py` importable in this process and, by PYTHONPATH, in those that it starts: vLLM looks at
models in a process of their own.
"""

import importlib.util
import os
import sys
from pathlib import Path

STAND_INS = str(Path(__file__).parent / "stand_ins")


def allow_text_only() -> None:
    """To be called before anything imports vLLM or transformers. Does nothing where torchvision is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    sys.path.append(STAND_INS)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), STAND_INS]))
