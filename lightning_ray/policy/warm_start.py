"""Makes a policy on the spot: a tokenizer and a model with random weights, or those of a model directory, and a
supervised warm-up.

The warm-up shows whole conversations with the harness (`demonstrations.py`) whose decisive choice is random. It
teaches the format and nothing about the answers, and so it sets the rate that training starts from: about one in the
number of choices. The result is an ordinary Hugging Face directory, kept in a cache under the hash of everything that
made it; it appears there whole or not at all.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from lightning_ray.config import ConfigError, WarmStartConfig
from lightning_ray.policy import chat_template, demonstrations, tiny
from lightning_ray.policy.directory import model_digest
from lightning_ray.tasks import one_line_bugs

Progress = Callable[[int, int, float], None]
"""Called with steps done, steps in all, loss (nats a token)."""

DEMONSTRATIONS = 6000
"""Different conversations; the warm-up goes over them as often as its steps ask for."""
TOKENIZER_TEXTS = 2000
VOCABULARY = 700
INITIALIZER_RANGE = 0.08
"""Standard deviation of the start weights. At the usual 0.02 a model this small does not learn to copy names."""
POSITIONS = 4096
"""Longest context that the model takes, in tokens."""
WARMUP_STEPS = 30
IGNORED = -100


def make_policy(
    config: WarmStartConfig, settings: dict[str, Any], progress: Progress | None = None
) -> Path:
    """The directory of the policy that `config` describes, made unless the cache has it.

    `settings` are `harness.settings` (mini-SWE-agent's own config): the templates that the demonstrations follow.
    Raises `ConfigError` where they cannot be followed or the cache cannot be written.
    """
    cache = config.cache.expanduser()
    target = cache / fingerprint(config, settings)
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=cache))
    except OSError as error:
        raise unwritable(config, error) from error
    try:
        tokenizer, examples = prepare(config, settings)
        model = start_model(config, tokenizer)
        warm_up(model, examples, config, progress)
        try:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            os.chmod(unfinished, 0o755)
            os.rename(unfinished, target)
        except OSError as error:
            if not target.is_dir():  # else another process made the same policy first
                raise unwritable(config, error) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def unwritable(config: WarmStartConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"policy.warm_start.cache is {str(config.cache)!r}, and the policy cannot be written there: {error}. "
        "Make room or give another directory."
    )


def fingerprint(config: WarmStartConfig, settings: dict[str, Any]) -> str:
    """Hash of everything that made a policy: settings, the code that makes it, library versions."""
    files = [Path(module.__file__) for module in (chat_template, demonstrations, tiny, one_line_bugs)]
    made_by = {
        "config": config.model_dump(mode="json", exclude={"cache", "model"}),
        "settings": settings,
        "model": model_digest(config.model.expanduser()) if config.model else None,
        "code": [hashlib.sha256(file.read_bytes()).hexdigest() for file in [*files, Path(__file__)]],
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
    }
    return hashlib.sha256(json.dumps(made_by, sort_keys=True, default=str).encode()).hexdigest()[:24]


Example = tuple[torch.Tensor, torch.Tensor]
"""Token ids [T] and labels [T]: label t is the token at t+1 where the policy says it, else IGNORED."""


def prepare(config: WarmStartConfig, settings: dict[str, Any]) -> tuple[PreTrainedTokenizerFast, list[Example]]:
    """The tokenizer and the demonstrations in tokens."""
    conversations = [
        demonstrations.segments(messages)
        for messages in islice(demonstrations.demonstrations(settings, config.seed), DEMONSTRATIONS)
    ]
    if config.model is not None:
        tokenizer = tokenizer_of(config.model.expanduser())
    else:
        texts = ("".join(text for text, _ in conversation) for conversation in conversations[:TOKENIZER_TEXTS])
        tokenizer = tiny.train_tokenizer(texts, VOCABULARY)
    return tokenizer, [encode(tokenizer, conversation) for conversation in conversations]


def tokenizer_of(directory: Path) -> PreTrainedTokenizerFast:
    """The directory's own, with the chat template of policies that are made here. Raises `ConfigError`."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    marks = [chat_template.START_OF_TURN, chat_template.END_OF_TURN]
    if unknown := [mark for mark in marks if len(tokenizer(mark, add_special_tokens=False).input_ids) != 1]:
        raise ConfigError(f"policy.warm_start.model: the tokenizer in {directory} has no token {unknown[0]!r}. Give a "
                          "model with ChatML's marks")
    if tokenizer.eos_token != chat_template.END_OF_TURN:
        raise ConfigError(f"policy.warm_start.model: answers of {directory} end with {tokenizer.eos_token!r}, not with "
                          f"{chat_template.END_OF_TURN!r}. Give a model that was tuned for chat")
    tokenizer.chat_template = chat_template.CHAT_TEMPLATE
    return tokenizer


def start_model(config: WarmStartConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """What the warm-up begins with, in float32."""
    if config.model is not None:
        return AutoModelForCausalLM.from_pretrained(config.model.expanduser(), dtype=torch.float32)
    return tiny.build_model(tokenizer, hidden_size=config.hidden_size, layers=config.layers, heads=config.heads,
                            positions=POSITIONS, initializer_range=INITIALIZER_RANGE, seed=config.seed)


def encode(tokenizer: PreTrainedTokenizerFast, conversation: list[tuple[str, bool]]) -> Example:
    ids, said = [], []
    encoded = tokenizer([text for text, _ in conversation], add_special_tokens=False).input_ids
    for (_, by_policy), piece in zip(conversation, encoded, strict=True):
        ids += piece
        said += [by_policy] * len(piece)
    tokens = torch.tensor(ids)
    labels = torch.full_like(tokens, IGNORED)
    labels[:-1] = torch.where(torch.tensor(said[1:]), tokens[1:], IGNORED)
    return tokens, labels


def learning_rate(config: WarmStartConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    rise = min(1.0, (step + 1) / WARMUP_STEPS)
    return config.lr * rise * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / config.steps)))


def warm_up(
    model: PreTrainedModel, examples: list[Example], config: WarmStartConfig, progress: Progress | None
) -> None:
    """Supervised training on what the policy says in the examples, in float32."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)
    shuffle, order = random.Random(config.seed), []
    model.train()
    for step in range(config.steps):
        if len(order) < config.batch_size:
            order = list(range(len(examples)))
            shuffle.shuffle(order)
        batch = [examples[order.pop()] for _ in range(config.batch_size)]
        tokens = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in batch], batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence([label for _, label in batch], True, IGNORED)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        said = labels != IGNORED
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[said]), labels[said])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if progress:
            progress(step + 1, config.steps, loss.item())
    model.eval()
