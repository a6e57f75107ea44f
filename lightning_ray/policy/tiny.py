"""A tiny language model of a real architecture (Qwen3) with a tokenizer of its own.

Both are ordinary Hugging Face objects: `save_pretrained` writes a directory that transformers, vLLM and DeepSpeed
load like any other checkpoint. The vocabulary is a byte-level BPE trained on the texts given, so every string can be
encoded, and what those texts repeat costs one token.
"""

from collections.abc import Iterable

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lightning_ray.policy.chat_template import CHAT_TEMPLATE, END_OF_TURN, PADDING, START_OF_TURN

PIECES = "|".join(
    [
        r"\s*```[a-z_]*\n?",  # a code fence and the white space around it
        r"</?[a-z_]+>\n?",  # a tag
        r" ?[A-Za-z_]+(?:\.py)?",  # a word or a file name
        r" ?[0-9]",
        r" ?[^\sA-Za-z0-9_<`]+",  # a run of signs
        r"\s+(?!\S)",
        r"\s+",
        r".",
    ]
)
"""What BPE may merge within."""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocabulary` tokens with the chat template of `chat_template.py`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[PADDING, START_OF_TURN, END_OF_TURN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PADDING,
        eos_token=END_OF_TURN,
        additional_special_tokens=[START_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden_size: int,
    layers: int,
    heads: int,
    positions: int,
    initializer_range: float,
    seed: int,
) -> Qwen3ForCausalLM:
    """A Qwen3 with random float32 weights, for contexts of up to `positions` tokens.

    Heads have `hidden_size / heads` dimensions; vLLM on the CPU takes 32, 64 and other multiples of 16.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden_size // heads,
        max_position_embeddings=positions,
        initializer_range=initializer_range,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model
