"""The policy with long answers of `benchmarks/schedule.py`: what it is shown is what the chat template makes later."""

import random
from itertools import islice
from pathlib import Path

import jinja2
import numpy as np

from benchmarks.schedules.policy import ASIDE, LONGEST_SHOWN, TEMPLATE, aside, demonstrated
from lightning_ray.config import Config
from lightning_ray.policy.chat_template import END_OF_TURN
from lightning_ray.policy.demonstrations import demonstrations

SETTINGS = Config.load(Path(__file__).parents[2] / "jobs" / "quickstart.yaml").harness.settings


def test_a_demonstration_is_the_prompt_of_its_last_turn_and_an_answer_with_an_aside():
    render = jinja2.Environment().from_string(TEMPLATE).render
    for pieces, messages in islice(zip(demonstrated(SETTINGS, 0), demonstrations(SETTINGS, 0), strict=False), 40):
        *prompt, (answer, said) = pieces
        turn = sum(text.count("<|im_start|>assistant") for text, _ in prompt)
        before = messages[: 2 * turn]
        for message in before:
            if message["role"] == "assistant":
                message["content"] += f"{ASIDE} hm hm"
        assert said and answer.count(ASIDE) == 1
        assert "".join(text for text, _ in prompt) == render(messages=before, add_generation_prompt=True)


def test_the_end_of_a_turn_is_learned_after_asides_only():
    said = [text for pieces in islice(demonstrated(SETTINGS, 0), 40) for text, by_policy in pieces if by_policy]
    assert any(END_OF_TURN in text for text in said)
    assert all(ASIDE in text for text in said if END_OF_TURN in text)


def test_asides_end_as_often_as_their_words_say():
    rng = random.Random(0)
    shown = [aside(rng) for _ in range(5000)]
    lengths = np.array([text.removeprefix(ASIDE).count(" ") for text in shown])
    assert lengths.max() == LONGEST_SHOWN
    assert all(text.endswith(END_OF_TURN) == (length < LONGEST_SHOWN)
               for text, length in zip(shown, lengths, strict=True))
    assert 25 <= np.median(lengths) <= 50
