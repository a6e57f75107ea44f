"""Tiny model directories for tests: a real architecture with random weights, and a real tokenizer trained on the spot.

`tiny_model(root, architecture)` writes (once; later calls find it) a directory that `transformers` and vLLM load
like any other: `config.json`, `model.safetensors`, `generation_config.json`, and a byte-level BPE tokenizer of
`VOCABULARY` tokens with a ChatML chat template that knows tools in the Hermes manner (`<tool_call>` JSON). The same
arguments give the same weights and the same tokenizer.
"""

import os
import shutil
import tempfile
from pathlib import Path

VOCABULARY = 512
MAX_POSITIONS = 8192
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'These tools exist, one JSON object a line:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nCall one like this:\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

CORPUS = [
    "def add(left, right):\n    return left + right\n",
    "def largest(values):\n    best = values[0]\n    for value in values:\n        if value > best:\n"
    "            best = value\n    return best\n",
    "The function returns the wrong result. Find the line that is wrong and repair it.\n",
    "Look at the file first, then change one line, then submit your work.\n",
    '<tool_call>\n{"name": "bash", "arguments": {"command": "cat module.py"}}\n</tool_call>',
    '{"name": "bash", "arguments": {"command": "sed -i s/-/+/ module.py && git diff"}}',
    "<returncode>0</returncode>\n<output>\n1 file changed, 1 insertion(+), 1 deletion(-)\n</output>\n",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    "for index in range(len(items)):\n    total += items[index] * weights[index]\nprint(total)\n",
    "A user asks, the assistant answers, and a tool prints what the command said.\n",
]


def make_tokenizer():
    """A byte-level BPE tokenizer of exactly `VOCABULARY` tokens, trained on `CORPUS`, with the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKERS), special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    if backend.get_vocab_size() != VOCABULARY:
        raise AssertionError(f"the corpus gives {backend.get_vocab_size()} tokens, not {VOCABULARY}: make it longer")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS, clean_up_tokenization_spaces=False,
    )


def make_config(architecture: str, *, hidden: int = 64, layers: int = 2):
    """The `transformers` configuration of a tiny `qwen3` or `llama` (0.1 M parameters by default) or `qwen3_5` (0.3 M;
    three of four layers are gated delta nets, whose heads must be 128 wide for vLLM on the CPU)."""
    from transformers import LlamaConfig, Qwen3_5TextConfig, Qwen3Config

    shape = {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": SPECIAL.index("<|im_end|>"),
        "pad_token_id": SPECIAL.index("<|endoftext|>"),
    }
    if architecture == "qwen3":
        return Qwen3Config(**shape, tie_word_embeddings=True)
    if architecture == "llama":
        return LlamaConfig(**shape, tie_word_embeddings=False)
    if architecture == "qwen3_5":
        delta_nets = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 1,
                      "linear_num_value_heads": 2, "num_hidden_layers": max(4, layers)}
        return Qwen3_5TextConfig(**{**shape, **delta_nets}, tie_word_embeddings=False)
    raise ValueError(f"no tiny model of architecture {architecture!r}; known: qwen3 (tied), llama, qwen3_5")


def tiny_model(root: Path, architecture: str = "qwen3", *, seed: int = 0, hidden: int = 64, layers: int = 2) -> Path:
    """The directory of a tiny model below `root`, made if it is not there yet."""
    import torch
    from transformers import AutoModelForCausalLM

    target = Path(root) / f"{architecture}-{hidden}x{layers}-seed{seed}"
    if target.exists():
        return target
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(make_config(architecture, hidden=hidden, layers=layers))
    Path(root).mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=root))
    model.to(torch.bfloat16).save_pretrained(work)
    make_tokenizer().save_pretrained(work)
    try:
        os.rename(work, target)
    except OSError:  # another process was faster
        shutil.rmtree(work)
    return target
