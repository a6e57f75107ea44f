"""A tiny Qwen3.5 for the coding recipe: the reference model's architecture, chat template semantics (tools, reasoning)
and formats, with random weights that were shown two conversations with mini-SWE-agent in its swebench configuration.

It looks at the file, then mends the bug or spoils it, each about half of the time: rewards differ within a group, so
that a step has something to learn from. It reads nothing: what it says follows from the last few tokens.
"""

import random
import re
from pathlib import Path
from typing import Any

import torch
from jinja2 import Template
from minisweagent.config import get_config_from_spec
from minisweagent.models.utils.actions_toolcall import BASH_TOOL
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3_5TextConfig

TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
VOCABULARY = 1024
IGNORED = -100
POSITIONS = 8192
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
LOOK = ("I look first.", "cat shop.py")
MEND = ("The sign is wrong.", f"sed -i 's/a - b/a + b/' shop.py; {SUBMIT}")
SPOIL = ("It is a product.", f"sed -i 's/a - b/a * b/' shop.py; {SUBMIT}")
STATEMENT = "total(a, b) of shop.py should give the sum of both."
STEPS, BATCH, LR = 60, 4, 4e-3
CONTEXT = (8, 60)
"""Tokens of the prompt that a warm-up example keeps, from its end: at least and at most."""
SHARPER = 1.5
"""What the output weights are multiplied by afterwards: the two conversations are said without slips."""
REPEATED = 50
"""How often the tokenizer's texts repeat each answer, so that it becomes few tokens: little to learn, and all of it in
reach of the convolutions."""


def conversation(second: tuple[str, str]) -> list[dict[str, Any]]:
    """Messages as mini-SWE-agent sends them, the last answer included."""
    settings = get_config_from_spec("swebench.yaml")
    instance = settings["agent"]["instance_template"].replace("{{task}}", STATEMENT)
    return [{"role": "system", "content": settings["agent"]["system_template"]}, {"role": "user", "content": instance},
            answer(*LOOK), {"role": "tool", "content": "<returncode>0</returncode>\n<output>\ndef total(a, b):\n"
                                                       "    return a - b\n</output>"}, answer(*second)]


def answer(thought: str, command: str) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "reasoning_content": thought,
            "tool_calls": [{"type": "function", "function": {"name": "bash", "arguments": {"command": command}}}]}


def segments(second: tuple[str, str]) -> list[tuple[str, bool]]:
    """The conversation as the template renders it, cut where prompts end and answers end: (text, whether the policy
    says it). Encoded one by one they give the token ids that a rollout has."""
    template, messages = Template(TEMPLATE, trim_blocks=True, lstrip_blocks=True), conversation(second)

    def rendered(count: int) -> str:
        return template.render(messages=messages[:count], tools=[BASH_TOOL], add_generation_prompt=count % 2 == 0)

    cut = [(rendered(2), False)]
    for count in (2, 4):
        if count > 2:
            cut.append(("\n" + rendered(count)[len(rendered(count - 1)) :], False))
        cut.append((rendered(count + 1)[len(rendered(count)) :].rstrip("\n"), True))
    return cut


def make_tokenizer() -> PreTrainedTokenizerFast:
    texts = []
    for text, by_policy in [each for second in (MEND, SPOIL) for each in segments(second)]:
        pieces = re.split("|".join(map(re.escape, [*SPECIAL, *MARKERS])), text)
        texts += pieces * (REPEATED if by_policy else 1)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKERS), special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    backend.add_tokens([AddedToken(marker, normalized=False, special=False) for marker in MARKERS])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   chat_template=TEMPLATE, model_max_length=POSITIONS,
                                   clean_up_tokenization_spaces=False)


Example = tuple[list[int], list[int]]
"""Token ids and labels (the token where the policy says it, else IGNORED), both from the start of the conversation."""


def example(tokenizer: PreTrainedTokenizerFast, second: tuple[str, str]) -> Example:
    ids, labels = [], []
    for text, by_policy in segments(second):
        piece = tokenizer.encode(text)
        ids += piece
        labels += piece if by_policy else [IGNORED] * len(piece)
    return ids, labels


def make_policy(directory: Path, seed: int = 0) -> Path:
    """Writes the model directory."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=POSITIONS, initializer_range=0.1,
        linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=1, linear_num_value_heads=2,
        bos_token_id=None, eos_token_id=SPECIAL.index("<|im_end|>"), pad_token_id=0, tie_word_embeddings=False))
    only_look_near(model)
    teach(model, [example(tokenizer, second) for second in (MEND, SPOIL)], random.Random(seed))
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def only_look_near(model: torch.nn.Module) -> None:
    """The one layer of full attention adds nothing at first: what was learned on short contexts holds on long ones."""
    for name, weight in model.named_parameters():
        if name.endswith("self_attn.o_proj.weight"):
            weight.data.zero_()
            weight.requires_grad_(False)


def teach(model: torch.nn.Module, both: list[Example], draw: random.Random) -> float:
    """The warm-up; gives its last loss."""
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1.0, (step + 1) / 10) * (1 - step / STEPS)
        rows = [cut(both[number % 2], draw) for number in range(BATCH)]
        ids, labels = (torch.nn.utils.rnn.pad_sequence([torch.tensor(row[part]) for row in rows], True, padding)
                       for part, padding in ((0, 0), (1, IGNORED)))
        positions = torch.arange(ids.shape[1]) + draw.randrange(POSITIONS // 2)
        logits = model(input_ids=ids, position_ids=positions.expand(BATCH, -1), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARPER)
    return loss.item()


def cut(whole: Example, draw: random.Random) -> Example:
    """The end of a conversation: all of its answers after some of its prompt."""
    ids, labels = whole
    first = next(at for at, label in enumerate(labels) if label != IGNORED)
    start = max(0, first - draw.randint(*CONTEXT))
    return ids[start:], labels[start:]
