"""Memory of one device, computed from a model's `config.json` and the settings, before anything starts. Pure.

    parts = estimate(shape_of(json.loads(path.read_text())), config)

Sizes are bytes on one device. Learner and generator share it, at the same time or by turns (`generator.in_flight`); by
turns the most is held either while the generator works, or while weights are published to it, when the learner's states
and the generator's weights are there together. The estimate counts tensors whose size follows from the
settings; fragmentation and libraries are `RESERVE`. Mixed-precision AdamW holds, for each parameter, 2 bytes of weight,
2 of gradient, and 12 of float32 weight and two moments (Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054, section 3);
ZeRO stages 1, 2, 3 split the last, the last two, all of them over the ranks. With `learner.lora` gradient and optimizer
are those of the adapters (all linear layers are assumed). Ranks that split sequences hold their part of a context.
Activations with checkpointing: the input of each layer, and one layer whole (Korthikanti et al. 2022, arXiv:2205.05198,
section 4: `34 s h` bytes in 16 bits, without the attention matrix, which fused attention never holds).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ray.config import Config, ConfigError
from lightning_ray.placement import takes_turns

GIB = 2**30
RESERVE = 3 * GIB
"""CUDA context, NCCL buffers, allocator fragmentation."""
CHUNK_LOGITS = 1 << 22
"""Logits that the learner holds at once (`learner/logprobs.py`), three times in float32."""
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "auto": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides its memory."""

    parameters: int
    layers: int
    hidden: int
    vocabulary: int
    cached_layers: int
    """Layers whose keys and values grow with the context; the others hold a state of fixed size."""
    kv_heads: int
    head: int
    state: int
    """Values of fixed state that one sequence holds in all other layers (gated delta nets)."""
    widths: int
    """Inputs and outputs of all linear layers inside the model: what each rank of LoRA adds in parameters."""


def shape_of(settings: Mapping[str, Any]) -> Shape:
    """From a `config.json` of the Llama or Qwen families (dense, with or without gated delta net layers). Vision towers
    are not counted. Raises `ConfigError` for what it does not know."""
    text = settings.get("text_config", settings)
    if any(name in text for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ConfigError("policy.path: this is a mixture of experts, whose memory is not computed here. Give a dense "
                          "model, or start without this check")
    try:
        hidden, layers, inner = text["hidden_size"], text["num_hidden_layers"], text["intermediate_size"]
        vocabulary, heads = text["vocab_size"], text["num_attention_heads"]
    except KeyError as error:
        raise ConfigError(f"policy.path: config.json has no field {error}. Give a decoder of the Llama or Qwen "
                          "families") from None
    kv_heads = text.get("num_key_value_heads") or heads
    head = text.get("head_dim") or hidden // heads
    linear = [kind for kind in layer_kinds(text) if kind == "linear_attention"]
    gated = 2 if linear else 1  # Qwen's hybrid models give attention an output gate of the size of the queries
    attention = hidden * head * (gated * heads + 2 * kv_heads) + heads * head * hidden
    full_widths = 4 * hidden + head * ((gated + 1) * heads + 2 * kv_heads)
    delta = delta_widths = state = 0
    if linear:
        keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
        values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
        gates = 2 * text["linear_num_value_heads"]
        kernel = text.get("linear_conv_kernel_dim", 4)
        delta = hidden * (2 * keys + 2 * values + gates) + values * hidden + kernel * (2 * keys + values)
        delta_widths = 5 * hidden + 2 * keys + 3 * values + gates
        state = len(linear) * (text["linear_num_value_heads"] * text["linear_key_head_dim"]
                               * text["linear_value_head_dim"] + kernel * (2 * keys + values))
    full = layers - len(linear)
    widths = full * full_widths + len(linear) * delta_widths + layers * 3 * (hidden + inner)
    tied = text.get("tie_word_embeddings", settings.get("tie_word_embeddings", False))
    parameters = (full * attention + len(linear) * delta + layers * (3 * hidden * inner + 2 * hidden)
                  + vocabulary * hidden * (1 if tied else 2) + hidden)
    return Shape(parameters, layers, hidden, vocabulary, full, kv_heads, head, state, widths)


def layer_kinds(text: Mapping[str, Any]) -> list[str]:
    """Of each layer, as `layer_types` names them or as `full_attention_interval` (4 where it is left out) implies."""
    if text.get("layer_types") or "linear_num_value_heads" not in text:
        return text.get("layer_types") or []
    interval = text.get("full_attention_interval") or 4
    return ["linear_attention" if number % interval else "full_attention"
            for number in range(1, text["num_hidden_layers"] + 1)]


@dataclass(frozen=True, slots=True)
class Estimate:
    parts: dict[str, int]
    """Bytes on each device, by what they are."""
    host: int
    """Bytes in the memory of the machines, all ranks together, for what is offloaded."""
    kv_bytes_per_token: int
    longest: int
    """Bytes that the generator holds for one sequence of full length."""
    turns: bool
    """Learner and generator have the device by turns."""

    @property
    def total(self) -> int:
        """The most that is held at once."""
        if not self.turns:
            return sum(self.parts.values())
        learner = sum(size for name, size in self.parts.items() if name.startswith("learner"))
        publishing = learner + self.parts["generator: weights"] + self.parts["reserve"]
        return max(publishing, self.beside_kv + self.parts["generator: KV cache"])

    @property
    def beside_kv(self) -> int:
        """What is held beside the KV cache."""
        if self.turns:
            return self.parts["generator: weights"] + self.parts["reserve"]
        return sum(size for name, size in self.parts.items() if name != "generator: KV cache")


def estimate(shape: Shape, config: Config) -> Estimate:
    """Bytes on one device. KV is what `max_num_seqs` sequences of full length hold on average: half of their length."""
    learner, generator = config.learner, config.generator
    ranks, stage = learner.ranks, learner.zero_stage
    count, width = shape.parameters, BYTES[learner.dtype]

    def split(size: int, from_stage: int) -> int:
        return -(-size // ranks) if stage >= from_stage else size

    trained = count if learner.lora is None else learner.lora.rank * shape.widths
    optimizer, gradients = split(12 * trained, 1), split(width * trained, 2)
    weights = split(width * count, 3)
    gathered = width * shape.hidden * shape.vocabulary if stage >= 3 else 0  # the embedding, the largest module
    tokens = max(-(-config.policy.max_context // learner.sequence_parallel), learner.micro_batch_tokens)
    layer = 34 * tokens * shape.hidden
    kept = 2 * tokens * shape.hidden * shape.layers if learner.gradient_checkpointing else layer * (shape.layers - 1)
    element = BYTES[generator.dtype]
    per_token = 2 * shape.cached_layers * shape.kv_heads * shape.head * element // generator.tensor_parallel
    fixed = shape.state * element // generator.tensor_parallel
    longest = per_token * config.policy.max_context + fixed
    average = per_token * config.policy.max_context // 2 + fixed
    parts = {
        "learner: weights": 0 if learner.offload_params else weights,
        "learner: gathered module": gathered,
        "learner: gradients": 0 if learner.offload_optimizer else gradients,
        "learner: optimizer": 0 if learner.offload_optimizer else optimizer,
        "learner: activations": layer + kept,
        "learner: logits": 3 * 4 * CHUNK_LOGITS,
        "generator: weights": element * count // generator.tensor_parallel,
        "generator: KV cache": max(longest, generator.max_num_seqs * average),
        "reserve": RESERVE,
    }
    if config.algorithm.kl_coef > 0 and learner.lora is None:
        parts["learner: reference"] = width * count
    turns = takes_turns(config, on_gpus=True)
    host = ranks * ((gradients + optimizer if learner.offload_optimizer or turns else 0)
                    + (weights if learner.offload_params or turns else 0)
                    + (parts.get("learner: reference", 0) if turns else 0))
    return Estimate(parts, host, per_token, longest, turns)


def advice(found: Estimate, config: Config, device_bytes: int) -> list[str]:
    """What does not fit on a device of this size, and what to change, the largest relief first."""
    over = found.total - device_bytes
    if over <= 0:
        return []
    learner, parts = config.learner, found.parts
    said = [f"needs {found.total / GIB:.1f} GiB of {device_bytes / GIB:.1f}"]
    too_much_kv = found.beside_kv + parts["generator: KV cache"] > device_bytes
    if too_much_kv and found.beside_kv + found.longest <= device_bytes:
        said.append("the KV cache is what is too much: generator.max_num_seqs "
                    f"{config.generator.max_num_seqs} -> {_sequences(found, config, device_bytes)} fits")
    relief = []
    if not learner.offload_optimizer and learner.zero_stage >= 1:
        relief.append((parts["learner: optimizer"] + parts["learner: gradients"], "learner.offload_optimizer: true"))
    if learner.zero_stage < 3 and learner.ranks > 1:
        relief.append((parts["learner: weights"] * (learner.ranks - 1) // learner.ranks, "learner.zero_stage: 3"))
    if not learner.gradient_checkpointing:
        relief.append((parts["learner: activations"] // 2, "learner.gradient_checkpointing: true"))
    if not learner.offload_params and learner.zero_stage >= 3:
        relief.append((parts["learner: weights"], "learner.offload_params: true"))
    if learner.lora is None:
        relief.append((parts["learner: optimizer"] + parts["learner: gradients"], "learner.lora: {}"))
    if config.policy.max_context > 8192:
        relief.append((parts["learner: activations"] // 2, "half of policy.max_context and learner.micro_batch_tokens"))
    said += [f"{name} frees {size / GIB:.1f} GiB" for size, name in sorted(relief, reverse=True) if size > GIB // 10]
    return said


def _sequences(found: Estimate, config: Config, device_bytes: int) -> int:
    """How many sequences of half the full length fit beside all else; at least one."""
    room = device_bytes - found.beside_kv
    return max(1, room * config.generator.max_num_seqs // found.parts["generator: KV cache"])
