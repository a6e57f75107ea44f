"""Warm-started policies: demonstrations are what mini-SWE-agent sends, the choice is a guess, the cache is whole."""

import json
import os
import random
from collections import Counter
from itertools import islice
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_ray.config import Config, ConfigError, PolicyConfig, WarmStartConfig
from lightning_ray.policy import chat_template, tiny, warm_start
from lightning_ray.policy.chat_template import ANSWER_START
from lightning_ray.policy.demonstrations import Conversation, demonstrations, random_choice, segments, steps
from lightning_ray.policy.source import check_policy, return_freed_memory
from lightning_ray.tasks.one_line_bugs import OPERATORS, WORDS, instances
from tests.tiny_models import tiny_model

SETTINGS = Config.load(Path(__file__).parents[2] / "jobs" / "quickstart.yaml").harness.settings


@pytest.fixture(scope="module")
def tokenizer():
    texts = ("".join(text for text, _ in segments(m)) for m in islice(demonstrations(SETTINGS, 0), 300))
    return tiny.train_tokenizer(texts, 700)


def plain(message: dict) -> dict:
    return {"role": message["role"], "content": message["content"]}


def test_demonstrations_are_what_mini_swe_agent_sends(tokenizer, tmp_path, monkeypatch):
    """Its own agent, model and environment classes, with scripted answers and a real shell: same prompt token ids."""
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    conversation, rng = Conversation(SETTINGS), random.Random(0)
    for number, instance in enumerate(islice(instances("agent", heldout=False), 3)):
        choice = random_choice(instance, rng)
        answers = [step.answer() for step in steps(instance, choice)]
        requests: list[list[dict]] = []

        class Scripted(LitellmTextbasedModel):
            def _query(self, messages, *, requests=requests, answers=answers, **kwargs):
                requests.append([plain(message) for message in messages])
                choices = [{"message": {"role": "assistant", "content": answers[len(requests) - 1]}}]
                return litellm.ModelResponse(choices=choices)

        workspace = tmp_path / str(number)
        workspace.mkdir()
        (workspace / instance.path).write_text(instance.with_operator(instance.wrong_operator))
        model = {key: value for key, value in SETTINGS["model"].items() if key != "model_class"}
        agent = DefaultAgent(
            Scripted(model_name="openai/policy", cost_tracking="ignore_errors", **model),
            LocalEnvironment(cwd=str(workspace)),
            **SETTINGS["agent"],
        )
        assert agent.run(instance.problem_statement())["exit_status"] == "Submitted"
        assert (workspace / instance.path).read_text() == instance.with_operator(choice)

        ids: list[int] = []
        cut = segments(conversation.messages(instance, choice))
        for request, (context, _), (answer, _) in zip(requests, cut[::2], cut[1::2], strict=True):
            ids += tokenizer.encode(context, add_special_tokens=False)
            sent = tokenizer.apply_chat_template(request, add_generation_prompt=True, return_dict=False)
            assert sent == ids
            ids += tokenizer.encode(answer, add_special_tokens=False)


def test_the_choice_is_independent_of_the_word():
    rng, chosen = random.Random(0), {word: Counter() for word in WORDS}
    for instance in islice(instances("choices", heldout=False), 4000):
        choice = random_choice(instance, rng)
        assert choice != instance.wrong_operator
        chosen[instance.word][choice == WORDS[instance.word]] += 1
    for counts in chosen.values():
        assert 0.17 < counts[True] / counts.total() < 0.33  # one in four: the operators that are not there yet


def test_each_operator_is_one_token_where_it_is_chosen(tokenizer):
    for symbol in OPERATORS:
        assert len(tokenizer.encode(f" {symbol}", add_special_tokens=False)) == 1


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in ("naïve ☃ \t\r\n", "bash: line 1: foo: command not found\n", "<a href='x'>`</a>\n\n\n```py\n"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_labels_are_what_the_policy_says(tokenizer):
    conversation = segments(next(demonstrations(SETTINGS, 0)))
    tokens, labels = warm_start.encode(tokenizer, conversation)
    said = [int(label) for label in labels if label != warm_start.IGNORED]
    assert tokenizer.decode(said) == "".join(text for text, by_policy in conversation if by_policy)
    for position, label in enumerate(labels):
        assert label in (warm_start.IGNORED, tokens[min(position + 1, len(tokens) - 1)])


def test_template_renders_tools_for_the_hermes_parser(tokenizer):
    call = {"type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "R"},
    ]
    tool = {"type": "function", "function": {"name": "bash", "parameters": {}}}
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>' in text
    assert json.dumps(tool) in text and text.endswith(ANSWER_START)
    assert text.count("<|im_start|>system") == 1
    longer = tokenizer.apply_chat_template(
        [*messages, {"role": "assistant", "content": "A"}], tools=[tool], tokenize=False
    )
    assert longer == text + "A<|im_end|>\n"


def small(cache: Path, **more) -> WarmStartConfig:
    return WarmStartConfig(hidden_size=32, heads=1, layers=1, steps=3, batch_size=4, cache=cache, **more)


@pytest.fixture
def few_demonstrations(monkeypatch):
    monkeypatch.setattr(warm_start, "DEMONSTRATIONS", 40)


@pytest.mark.usefixtures("few_demonstrations")
def test_a_policy_is_an_ordinary_checkpoint_made_once(tmp_path):
    heard = []
    path = warm_start.make_policy(small(tmp_path), SETTINGS, lambda *step: heard.append(step))
    assert [step[:2] for step in heard] == [(1, 3), (2, 3), (3, 3)]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.config.architectures == ["Qwen3ForCausalLM"] and model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"
    messages = [{"role": "user", "content": "U"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nU<|im_end|>\n"
    assert warm_start.make_policy(small(tmp_path), SETTINGS, lambda *step: pytest.fail("made twice")) == path
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.usefixtures("few_demonstrations")
def test_the_same_seed_makes_the_same_weights_and_another_seed_others(tmp_path):
    def weights(folder: str, seed: int) -> torch.Tensor:
        path = warm_start.make_policy(small(tmp_path / folder, seed=seed), SETTINGS)
        return AutoModelForCausalLM.from_pretrained(path).lm_head.weight

    first = weights("a", 0)
    assert torch.equal(first, weights("b", 0))
    assert first.shape != weights("c", 1).shape or not torch.equal(first, weights("c", 1))


def test_everything_that_makes_a_policy_is_in_its_name(tmp_path):
    config = small(tmp_path)
    names = {
        warm_start.fingerprint(config, SETTINGS),
        warm_start.fingerprint(config.model_copy(update={"seed": 1}), SETTINGS),
        warm_start.fingerprint(config.model_copy(update={"steps": 4}), SETTINGS),
        warm_start.fingerprint(config, SETTINGS | {"agent": SETTINGS["agent"] | {"system_template": "other"}}),
    }
    assert len(names) == 4
    moved = config.model_copy(update={"cache": tmp_path / "elsewhere"})
    assert warm_start.fingerprint(moved, SETTINGS) == warm_start.fingerprint(config, SETTINGS)


@pytest.mark.usefixtures("few_demonstrations")
def test_a_model_can_be_warmed_up_instead_of_random_weights(tmp_path):
    own = tiny_model(tmp_path, "llama")
    config = small(tmp_path / "cache", model=own)
    path = warm_start.make_policy(config, SETTINGS)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    before = AutoModelForCausalLM.from_pretrained(own, dtype=torch.float32).lm_head.weight
    assert model.config.architectures == ["LlamaForCausalLM"] and model.lm_head.weight.shape == before.shape
    moved = (model.lm_head.weight - before).abs()
    assert 0 < moved.max() < 0.1, "three steps from where it was"
    assert tokenizer.chat_template == chat_template.CHAT_TEMPLATE
    assert tokenizer("ab").input_ids == AutoTokenizer.from_pretrained(own)("ab").input_ids
    assert warm_start.fingerprint(config, SETTINGS) != warm_start.fingerprint(small(tmp_path), SETTINGS)


def test_a_model_without_chatmls_marks_is_refused(tmp_path):
    own = tiny_model(tmp_path, "llama")
    settings = json.loads((own / "tokenizer_config.json").read_text())
    (own / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|endoftext|>"}))
    with pytest.raises(ConfigError, match=r"warm_start\.model: answers of .* end with '<\|endoftext\|>'"):
        warm_start.make_policy(small(tmp_path / "cache", model=own), SETTINGS)
    with pytest.raises(ConfigError, match=r"policy\.warm_start\.model: there is no directory .*nowhere"):
        check_policy(PolicyConfig(warm_start={"model": tmp_path / "nowhere"}))


@pytest.mark.usefixtures("few_demonstrations")
def test_an_interrupted_warm_up_leaves_nothing(tmp_path):
    def stop(*step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_start.make_policy(small(tmp_path), SETTINGS, stop)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("few_demonstrations")
def test_a_cache_that_cannot_be_written_is_bad_input(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"policy\.warm_start\.cache is .*file"):
        warm_start.make_policy(small(tmp_path / "file"), SETTINGS)


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("agent", {"instance_template": "{{task}} on {{system}}"}, "'system' is undefined"),
        ("model", {"action_regex": "<run>(.*?)</run>"}, "action_regex"),
        ("agent", {"system_template": None}, "agent.system_template is missing"),
    ],
)
def test_settings_that_demonstrations_cannot_follow_are_bad_input(part, change, named):
    changed = {key: value for key, value in (SETTINGS[part] | change).items() if value is not None}
    with pytest.raises(ConfigError, match=named):
        next(demonstrations(SETTINGS | {part: changed}, 0))


def test_what_a_warm_up_freed_goes_back_to_the_system():
    """In pieces below glibc's limit for mappings of their own, under one that is still in use: as parameters are."""
    pieces = [bytearray(100_000) for _ in range(3000)]
    last = bytearray(100_000)
    del pieces
    held = psutil.Process().memory_info().rss
    return_freed_memory()
    assert held - psutil.Process().memory_info().rss > 200_000_000 and len(last)
