"""One update of the learner against two others on the same samples: tokens/s and peak memory.

    python benchmarks/learner.py                                # this learner and a plain loop
    python benchmarks/learner.py --trl-python VENV/bin/python   # and TRL's GRPOTrainer, in an environment of its own
    python benchmarks/learner.py --rows 10,4k --json FILE

What is compared, each in a process of its own, float32, the same model, samples, optimizer step and token budget:
- learner: `lightning_ray.learner.engine.Learner`;
- plain: Hugging Face model and DeepSpeed (ZeRO-2, the same CPU Adam), right-padded micro-batches, whole logits;
- trl: TRL's `GRPOTrainer.training_step` over the micro-batches of one update, then clipping and AdamW; prompts padded
  on the left, completions on the right, as it does; observations are its `tool_mask`.
All three give the same gradient, which is checked: the norms must agree.

Rows `1`, `10`, `100`: so many samples of log-normal length (median 200, sigma 0.9, at most 1,500), a vocabulary of
4,096, no gradient checkpointing.
Row `4k`: one sample of 4,096 tokens, a vocabulary of 49,152, gradient checkpointing on for all. A quarter of each
sample is its prompt; then answers of about 60 tokens and observations of about 90 take turns, as in agent rollouts.

`tokens/CPU-s`: tokens of the samples (no padding) in one update, by CPU time; median of the updates after the first.
`tokens/s`: the same by the clock. On a machine that others use too only CPU time says something, and only with one
thread (the default): waiting threads spin. `memory`: the highest resident size during the updates less that before the
first one (weights are loaded, there is no gradient yet).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CONTENDERS = ("learner", "plain", "trl")
BUDGET = 8192
"""Tokens of a micro-batch, padding counted."""
NORM, LR, TEMPERATURE = 1.0, 1e-4, 1.0
SHAPES = {
    "small": {"hidden": 128, "layers": 4, "vocabulary": 4096},
    "wide": {"hidden": 256, "layers": 4, "vocabulary": 49152},
}


def lengths_of(row: str) -> list[int]:
    if row == "4k":
        return [4096]
    drawn = np.random.default_rng(0).lognormal(np.log(200), 0.9, int(row))
    return np.clip(drawn, 64, 1500).astype(int).tolist()


def shape_of(row: str) -> dict:
    return SHAPES["wide" if row == "4k" else "small"]


def make_samples(row: str) -> list:
    """One sample a rollout, so that all three normalise alike."""
    from lightning_ray.trajectory.samples import Sample

    rng, samples = np.random.default_rng(1), []
    lengths = lengths_of(row)
    for number, length in enumerate(lengths):
        mask, at = np.zeros(length, dtype=bool), max(1, length // 4)
        while at < length:
            answer, observation = int(rng.integers(30, 90)), int(rng.integers(60, 120))
            mask[at : at + answer] = True
            at += answer + observation
        samples.append(
            Sample(
                token_ids=rng.integers(3, shape_of(row)["vocabulary"], length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.zeros(length, dtype=np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantage=float(rng.normal()),
                rollout=number,
                weight=1 / (len(lengths) * int(mask.sum())),
            )
        )
    return samples


def make_model(directory: Path, row: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = shape_of(row)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=shape["vocabulary"], hidden_size=shape["hidden"], intermediate_size=3 * shape["hidden"],
        num_hidden_layers=shape["layers"], num_attention_heads=4, num_key_value_heads=2,
        head_dim=shape["hidden"] // 4, max_position_embeddings=8192, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def rows_of_a_micro_batch(samples: list) -> int:
    """As many rows of the longest sample's width as the budget holds; a divisor of their number, so that means of
    micro-batches are means of all."""
    most = max(1, BUDGET // max(len(sample.token_ids) for sample in samples))
    return max(rows for rows in range(1, most + 1) if len(samples) % rows == 0)


class Learner:
    def __init__(self, model: Path, samples: list, checkpointing: bool) -> None:
        from lightning_ray.config import AlgorithmConfig, LearnerConfig
        from lightning_ray.learner import engine

        join_alone()
        config = LearnerConfig(
            dtype="float32", lr=LR, warmup_steps=0, max_grad_norm=NORM, micro_batch_tokens=BUDGET,
            gradient_checkpointing=checkpointing,
        )
        algorithm = AlgorithmConfig(tis_cap=None)
        self.learner = engine.Learner(model, config, algorithm, temperature=TEMPERATURE, total_steps=100)
        self.samples = samples

    def update(self) -> float:
        return self.learner.step(self.samples, 0)["grad_norm"]


class Plain:
    def __init__(self, model: Path, samples: list, checkpointing: bool) -> None:
        import deepspeed
        import torch
        from transformers import AutoModelForCausalLM

        from lightning_ray.config import LearnerConfig
        from lightning_ray.learner.optimizer import make_optimizer

        join_alone()
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        if checkpointing:
            policy.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = make_optimizer(policy.parameters(), LearnerConfig(lr=LR), on_gpu=False)
        rows = rows_of_a_micro_batch(samples)
        self.steps = len(samples) // rows
        self.engine, *_ = deepspeed.initialize(
            model=policy.train(), optimizer=optimizer, dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": self.steps,
                "zero_optimization": {"stage": 2}, "gradient_clipping": NORM, "zero_allow_untested_optimizer": True,
                "steps_per_print": None,
            },
        )
        self.batches = [self._batch(samples[first : first + rows]) for first in range(0, len(samples), rows)]

    @staticmethod
    def _batch(samples: list):  # type: ignore[no-untyped-def]
        import torch

        width = max(len(sample.token_ids) for sample in samples)
        ids, mask, trained = (np.zeros((len(samples), width), dtype=np.int64) for _ in range(3))
        for row, sample in enumerate(samples):
            length = len(sample.token_ids)
            ids[row, :length], mask[row, :length], trained[row, :length] = sample.token_ids, 1, sample.loss_mask
        advantages = torch.tensor([sample.advantage for sample in samples])
        return torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(trained), advantages

    def update(self) -> float:
        import torch

        for ids, mask, trained, advantages in self.batches:
            logits = self.engine(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1] / TEMPERATURE
            logprobs = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            ratio = torch.exp(logprobs - logprobs.detach())
            surrogate = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.28) * advantages[:, None])
            trained = trained[:, 1:]
            loss = -((surrogate * trained).sum(-1) / trained.sum(-1)).mean()
            self.engine.backward(loss)
            self.engine.step()
        return float(self.engine.get_global_grad_norm())


class Trl:
    def __init__(self, model: Path, samples: list, checkpointing: bool) -> None:
        import torch
        from datasets import Dataset
        from transformers import AutoModelForCausalLM
        from trl import GRPOConfig, GRPOTrainer

        from tests.tiny_models import make_tokenizer

        class OneUpdate(GRPOTrainer):
            def _prepare_inputs(self, batch):  # type: ignore[no-untyped-def]
                return batch

        rows = rows_of_a_micro_batch(samples)
        self.steps = len(samples) // rows
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        with tempfile.TemporaryDirectory() as out:
            config = GRPOConfig(
                out, per_device_train_batch_size=2, num_generations=2, use_cpu=True, bf16=False, beta=0.0,
                loss_type="grpo", learning_rate=LR, temperature=TEMPERATURE, report_to=[], max_grad_norm=NORM,
                gradient_checkpointing=checkpointing, gradient_checkpointing_kwargs={"use_reentrant": False},
                epsilon=0.2, epsilon_high=0.28,
            )
            self.trainer = OneUpdate(
                policy, lambda **_: [0.0], args=config, train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
                processing_class=make_tokenizer(),
            )
        self.trainer.current_gradient_accumulation_steps = self.steps
        self.trainer.create_optimizer()
        self.model, self.optimizer = self.trainer.accelerator.prepare(self.trainer.model, self.trainer.optimizer)
        self.model.train()
        whole = self._padded(samples)
        self.batches = [
            {name: value[first : first + rows] for name, value in whole.items()}
            for first in range(0, len(samples), rows)
        ]

    @staticmethod
    def _padded(samples: list) -> dict:
        """The whole step padded at once, as `_generate_and_score_completions` does."""
        import torch

        starts = [int(np.flatnonzero(sample.loss_mask)[0]) for sample in samples]
        before, after = max(starts), max(len(s.token_ids) - start for s, start in zip(samples, starts, strict=True))
        shape = {"prompt_ids": before, "prompt_mask": before}
        shape |= {"completion_ids": after, "completion_mask": after, "tool_mask": after}
        arrays = {name: np.zeros((len(samples), width), dtype=np.int64) for name, width in shape.items()}
        for row, (sample, start) in enumerate(zip(samples, starts, strict=True)):
            rest = len(sample.token_ids) - start
            arrays["prompt_ids"][row, before - start :] = sample.token_ids[:start]
            arrays["prompt_mask"][row, before - start :] = 1
            arrays["completion_ids"][row, :rest] = sample.token_ids[start:]
            arrays["completion_mask"][row, :rest] = 1
            arrays["tool_mask"][row, :rest] = sample.loss_mask[start:]
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return batch | {"advantages": torch.tensor([sample.advantage for sample in samples])}

    def update(self) -> float:
        for batch in self.batches:
            self.trainer.training_step(self.model, batch, None)
        norm = self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), NORM).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def join_alone() -> None:
    from lightning_ray.learner.engine import join
    from lightning_ray.learner.worker import free_address

    join(0, 1, free_address())


def resident(field: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since `forget_highest`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def forget_highest() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measure(contender: str, row: str, model: Path, updates: int, threads: int) -> dict:
    import torch

    torch.set_num_threads(threads)
    samples = make_samples(row)
    made = {"learner": Learner, "plain": Plain, "trl": Trl}[contender](model, samples, checkpointing=row == "4k")
    before = resident("VmRSS")
    forget_highest()
    norms, seconds, cpu_seconds = [], [], []
    for _ in range(updates + 1):
        started, used = time.perf_counter(), time.process_time()
        norms.append(made.update())
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - used)
    tokens = sum(len(sample.token_ids) for sample in samples)
    return {
        "tokens_cpu_s": tokens / statistics.median(cpu_seconds[1:] or cpu_seconds),
        "tokens_s": tokens / statistics.median(seconds[1:] or seconds), "memory": resident("VmHWM") - before,
        "norm": norms[0], "tokens": tokens, "peak": resident("VmHWM"),
    }


def run(contender: str, row: str, model: Path, updates: int, threads: int, python: str) -> dict:
    """`measure` in a process of its own."""
    environment = os.environ | {
        "DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1",
        "OMP_NUM_THREADS": str(threads), "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
    }
    if contender == "trl":  # its accelerate would make a process group of these
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
            del environment[name]
    with tempfile.NamedTemporaryFile("r") as result:
        command = [python, __file__, "--one", contender, "--rows", row]
        command += ["--updates", str(updates), "--threads", str(threads)]
        done = subprocess.run(
            [*command, "--model", str(model), "--json", result.name], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{contender}, row {row}, failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return json.load(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,10,100,4k")
    parser.add_argument("--updates", type=int, default=3, help="measured updates after the first (default 3)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trl-python", help="the interpreter of an environment with trl (and this project's packages)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        found = measure(options.one, options.rows, options.model, options.updates, options.threads)
        options.json.write_text(json.dumps(found))
        return
    pythons = {"learner": sys.executable, "plain": sys.executable}
    if options.trl_python:
        pythons["trl"] = options.trl_python
    else:
        print("trl: left out, because --trl-python is not given")
    titles = ("contender", "tokens", "tokens/CPU-s", "learner is x", "tokens/s", "memory MB", "x learner")
    print(f"{'row':>4}", *(f"{title:>12}" for title in titles))
    table = []
    for row in options.rows.split(","):
        with tempfile.TemporaryDirectory() as directory:
            make_model(Path(directory), row)
            found = {
                name: run(name, row, Path(directory), options.updates, options.threads, python)
                for name, python in pythons.items()
            }
        norms = [result["norm"] for result in found.values()]
        if max(norms) > 1.01 * min(norms):
            raise SystemExit(f"row {row}: the gradients differ, so this compares different updates: {found}")
        ours = found["learner"]
        for name, result in found.items():
            table.append({"row": row, "contender": name, **result})
            print(f"{row:>4} {name:>12} {result['tokens']:>12} {result['tokens_cpu_s']:>12.0f} "
                  f"{ours['tokens_cpu_s'] / result['tokens_cpu_s']:>12.2f} {result['tokens_s']:>12.0f} "
                  f"{result['memory'] / 2**20:>12.0f} {result['memory'] / ours['memory']:>12.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
