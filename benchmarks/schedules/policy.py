"""The quickstart's policy, made talkative: its answers have the long tail that those of a thinking model have.

After its command each answer goes on with an aside, one word said again and again, which the chat template leaves out
of later prompts (as Qwen3's does with thinking). The word decides how probable it is that the aside ends: a mixture of
geometric lengths that is close to a log-normal one with p99 / p50 = 15. Nothing is forced or padded: the lengths are
what the policy samples. The warm-up is the quickstart's, on its demonstrations, each cut after a random turn.
"""

import hashlib
import random
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from lightning_ray.config import WarmStartConfig
from lightning_ray.policy import chat_template, demonstrations, tiny, warm_start

ASIDE = "\n<aside>"
LENGTHS = {" ok": (0.28, 14), " hm": (0.36, 52), " well": (0.26, 155), " so": (0.10, 480)}
"""Word of an aside -> its share of the answers and its mean number."""
LONGEST_SHOWN = 64
"""Words of an aside in a demonstration: of longer ones the beginning is shown, which has the same chance of an end."""
FENCE = "\n```"
TEMPLATE = chat_template.CHAT_TEMPLATE.replace(
    "(message.content or '')", f"(message.content or '').split({ASIDE!r})[0]")


def make(config: WarmStartConfig, settings: dict, progress: warm_start.Progress | None = None) -> Path:
    """The directory of the policy, made unless it is there."""
    here = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    target = config.cache.expanduser() / f"talkative-{warm_start.fingerprint(config, settings)}-{here}"
    if target.is_dir():
        return target
    shown = list(islice(demonstrated(settings, config.seed), warm_start.DEMONSTRATIONS))
    texts = ("".join(text for text, _ in pieces) for pieces in shown[: warm_start.TOKENIZER_TEXTS])
    tokenizer = tiny.train_tokenizer(texts, warm_start.VOCABULARY)
    tokenizer.chat_template = TEMPLATE
    model = warm_start.start_model(config, tokenizer)
    warm_start.warm_up(model, [warm_start.encode(tokenizer, pieces) for pieces in shown], config, progress)
    unfinished = target.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    return unfinished.rename(target)


def demonstrated(settings: dict, seed: int) -> Iterator[list[tuple[str, bool]]]:
    """Endless demonstrations as `demonstrations.segments` gives them, with an aside at the end."""
    rng = random.Random(f"asides {seed}")
    for messages in demonstrations.demonstrations(settings, seed):
        pieces = demonstrations.segments(messages)
        pieces = pieces[: 2 * rng.randint(1, len(pieces) // 2)]
        shown = []
        for text, said in pieces[:-1]:
            if said:  # an answer of which the prompt has lost the aside: it did not end there
                shown += [(text.partition(FENCE + chat_template.END_OF_TURN)[0], True),
                          (FENCE + chat_template.END_OF_TURN, False)]
            else:
                shown.append((text, False))
        yield [*shown, (pieces[-1][0].removesuffix(chat_template.END_OF_TURN) + aside(rng), True)]


def aside(rng: random.Random) -> str:
    word = rng.choices(list(LENGTHS), [share for share, _ in LENGTHS.values()])[0]
    words = 1
    while words < LONGEST_SHOWN and rng.random() > 1 / LENGTHS[word][1]:
        words += 1
    return ASIDE + word * words + ("" if words == LONGEST_SHOWN else chat_template.END_OF_TURN)
