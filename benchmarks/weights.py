"""What a publish costs: `python benchmarks/weights.py [--parameters 1 10 135] [--dtype float32] [--json FILE]`.

For random Llamas of about so many million parameters: a real learner and a real generator in a local Ray; weights are
published several times while a generation runs. Printed, in the median: the pause that the generation sees (freeze to
thaw), its parts, bytes per second, and the pause as a multiple of what cannot be had for less: the time in which the
same bytes are copied in memory, and that in which the engine takes over weights that are in its process already (load).
Less than 2 is wanted. The parts: pulling by the engine; verifying, which compares what the engine computes with to what
the learner counted; and calls: all else, the learner's gathering, freeze and thaw included.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SHAPES = {
    1: {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 1024},
    10: {"hidden_size": 320, "num_hidden_layers": 6, "vocab_size": 4096},
    135: {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152, "num_key_value_heads": 3},
}
"""By millions of parameters; the last is SmolLM2-135M's."""


def make_model(directory: Path, millions: int) -> int:
    """A random Llama; returns its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    shape = SHAPES[millions]
    heads = shape["hidden_size"] // 64
    config = LlamaConfig(**{"num_key_value_heads": heads, **shape}, num_attention_heads=heads,
                         intermediate_size=shape["hidden_size"] * 8 // 3 // 64 * 64, max_position_embeddings=4096,
                         tie_word_embeddings=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return model.num_parameters()


def copy_s(size: int, repeats: int = 5) -> float:
    """Seconds to copy `size` bytes in memory, pages touched before."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure(millions: int, dtype: str, bucket_mb: int, repeats: int) -> dict[str, float]:
    import ray

    from lightning_ray.config import Config
    from lightning_ray.generator.request import GenerateRequest
    from lightning_ray.policy_group import PolicyGroup

    with tempfile.TemporaryDirectory() as root:
        parameters = make_model(Path(root), millions)
        config = Config(
            policy={"path": root, "max_context": 4096}, learner={"dtype": dtype, "threads": 1, "zero_stage": 0},
            generator={"dtype": dtype, "bucket_mb": bucket_mb, "max_num_seqs": 8,
                       "extra": {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 512 << 20}})
        group = PolicyGroup.start(config, Path(root), total_steps=1)
        try:
            group.ready()
            request = GenerateRequest("running", list(range(10, 50)), 4000, 1.0, params={"ignore_eos": True})
            running = group.generators[0].generate.remote(request)
            group.publish(group.version + 1)  # the first one touches memory that the others find touched
            rounds = [group.publish(group.version + 1) for _ in range(repeats)]
            ray.get(group.generators[0].abort.remote("running"))
            crossed = len(set(ray.get(running).versions))
        finally:
            group.shutdown()
    if not all(each["weights_verified"] for each in rounds):
        raise RuntimeError("a publish was not verified")
    median = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    return {**median, "parameters": parameters, "copy_s": copy_s(int(median["weights_bytes"])), "crossed": crossed}


def row(found: dict[str, float]) -> str:
    size, copy, load = found["weights_bytes"], found["copy_s"], found["load_s"]
    calls = found["pause_s"] - found["pull_s"] - load - found["verify_s"]
    cells = [f"{found['parameters'] / 1e6:.1f} M", f"{size / 1e6:.1f} MB", ms(copy), ms(found["pause_s"]), ms(calls),
             ms(found["pull_s"]), ms(load), ms(found["verify_s"]), f"{size / found['publish_s'] / 1e6:.0f} MB/s",
             f"{found['pause_s'] / (copy + load):.1f}x"]
    return f"| {' | '.join(cells)} |"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, nargs="+", choices=SHAPES, default=list(SHAPES), metavar="MILLIONS")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
             object_store_memory=1 << 30)
    print("| parameters | bytes | copy in memory | pause | calls | pull | load | verify | published | "
          "pause / (copy + load) |")
    print("|" + "---|" * 10)
    rows = []
    for millions in arguments.parameters:
        found = measure(millions, arguments.dtype, arguments.bucket_mb, arguments.repeats)
        print(row(found), flush=True)
        rows.append(found)
        if found["crossed"] < 2:
            print("(no generation ran through these publishes)")
    ray.shutdown()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
