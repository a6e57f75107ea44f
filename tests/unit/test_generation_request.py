"""Law 2 and law 4 for one generation: cut off anywhere and continued, it is the generation that was never cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.generator.request import GenerateRequest, Generation, Progress, join, versions_of

CONTEXT = 64
END = 0


def next_token(ids: list[int]) -> int:
    """A deterministic engine: the next token follows from all tokens before it; every now and then it is the end."""
    return hash(tuple(ids)) % 23


def engine(request: GenerateRequest, version: int, cut: int | None = None) -> Generation:
    """What an engine of context `CONTEXT` returns; `cut`: it is aborted after so many tokens."""
    ids, reason = [], "length"
    budget = min(request.max_tokens, CONTEXT - len(request.prompt_ids))
    while len(ids) < budget:
        if cut is not None and len(ids) == cut:
            reason = "abort"
            break
        ids.append(next_token([*request.prompt_ids, *ids]))
        if ids[-1] == END:
            reason = "stop"
            break
    return Generation(np.array(ids, np.int32), np.array([-token / 7 for token in ids], np.float32),
                      np.full(len(ids), version, np.int32), reason)


def request(**changes) -> GenerateRequest:
    usual = {"request_id": "r", "prompt_ids": [3, 1, 4], "max_tokens": 40, "temperature": 1.0}
    return GenerateRequest(**{**usual, **changes})


requests = st.builds(request, prompt_ids=st.lists(st.integers(1, 99), min_size=1, max_size=CONTEXT - 1),
                     max_tokens=st.integers(1, 80))


@given(requests, st.lists(st.integers(0, 12), max_size=8))
def test_law_4_a_generation_cut_anywhere_is_the_one_never_cut(wanted, cuts):
    progress, version = Progress(wanted, CONTEXT), 0
    while not progress.done:
        progress.add(engine(progress.next_request(), version, cuts[version] if version < len(cuts) else None))
        version += 1
    whole, joined = engine(wanted, 0), progress.generation()
    assert joined.token_ids.tolist() == whole.token_ids.tolist()
    assert joined.logprobs.tolist() == whole.logprobs.tolist()
    assert joined.finish_reason == whole.finish_reason
    assert len(joined.versions) == len(joined.token_ids)
    assert np.all(np.diff(joined.versions) >= 0), "later tokens come from the same or newer weights"
    assert (joined.token_ids.dtype, joined.logprobs.dtype, joined.versions.dtype) == (np.int32, np.float32, np.int32)


@given(requests, st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_every_request_sent_stays_within_the_budget(wanted, cuts):
    progress = Progress(wanted, CONTEXT)
    for cut in cuts:
        if progress.done:
            break
        sent = progress.next_request()
        assert sent.prompt_ids[:len(wanted.prompt_ids)] == wanted.prompt_ids
        assert len(sent.prompt_ids) + sent.max_tokens == len(wanted.prompt_ids) + wanted.max_tokens
        assert sent.max_tokens >= 1 and len(sent.prompt_ids) < CONTEXT
        assert all(type(token) is int for token in sent.prompt_ids)
        progress.add(engine(sent, 0, cut))


def test_each_piece_keeps_its_version():
    progress = Progress(request(), CONTEXT)
    for version, cut in enumerate([2, 0, 3]):
        progress.add(engine(progress.next_request(), version, cut))
    progress.cancel()
    assert progress.generation().versions.tolist() == [0, 0, 2, 2, 2]


def test_a_cancelled_generation_ends_with_what_it_has():
    progress = Progress(request(), CONTEXT)
    progress.add(engine(progress.next_request(), 0, 4))
    assert not progress.done
    progress.cancel()
    progress.add(engine(progress.next_request(), 1, 2))
    assert progress.done
    answer = progress.generation()
    assert answer.finish_reason == "abort" and len(answer.token_ids) == 6


def test_cancelled_before_it_was_ever_sent():
    progress = Progress(request(), CONTEXT)
    progress.cancel()
    answer = progress.generation()
    assert answer.finish_reason == "abort" and len(answer.token_ids) == len(answer.versions) == 0


def test_an_unfinished_generation_is_no_answer():
    with pytest.raises(RuntimeError, match="not done"):
        Progress(request(), CONTEXT).generation()


def test_an_abort_with_the_budget_used_up_is_the_end():
    progress = Progress(request(max_tokens=5, prompt_ids=[1]), CONTEXT)
    cut = engine(request(max_tokens=9, prompt_ids=[1]), 0, 5)
    assert len(cut.token_ids) == 5
    progress.add(cut)
    assert progress.generation().finish_reason == "length"


def test_no_random_number_is_drawn_twice():
    progress = Progress(request(seed=7), CONTEXT)
    seeds = [progress.next_request().seed]
    for cut in (3, 3):
        progress.add(engine(progress.next_request(), 0, cut))
        seeds.append(progress.next_request().seed)
    assert seeds[0] == 7 and len(set(seeds)) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_taken_back_before_the_first_token_it_draws_as_it_would_have():
    progress = Progress(request(seed=7), CONTEXT)
    progress.add(engine(progress.next_request(), 0, 0))
    assert progress.next_request() == progress.request


def test_a_stop_string_that_may_have_begun_is_sampled_again():
    progress = Progress(request(stop=["END", "é"]), CONTEXT)
    progress.add(engine(progress.next_request(), 0, 8))
    assert progress.sampled == 8 - 3
    progress.add(engine(progress.next_request(), 1, 2))
    assert progress.sampled == 5, "a piece shorter than the string is dropped whole"


def test_min_tokens_is_counted_down():
    progress = Progress(request(params={"min_tokens": 6, "top_p": 0.9}), CONTEXT)
    progress.add(engine(progress.next_request(), 0, 4))
    assert progress.next_request().params == {"min_tokens": 2, "top_p": 0.9}


def test_what_only_the_engine_knows_begins_again():
    constrained = request(params={"structured_outputs": {"json": {}}})
    progress = Progress(constrained, CONTEXT)
    progress.add(engine(progress.next_request(), 0, 4))
    assert progress.next_request() == constrained


@pytest.mark.parametrize(("changes", "message"), [
    ({"prompt_ids": []}, "no tokens"), ({"max_tokens": 0}, "max_tokens is 0"),
])
def test_requests_that_ask_for_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Progress(request(**changes), CONTEXT)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=6))
def test_versions_of_spells_out_spans(parts):
    spans, expected, at = [], [], 0
    for version, length in parts:
        spans.append((str(version), at, at + length))
        expected += [version] * length
        at += length
    assert versions_of(spans, at).tolist() == expected


@pytest.mark.parametrize("spans", [
    [("0", 0, 3)], [("0", 0, 2), ("1", 3, 5)], [("0", 0, 3), ("1", 2, 5)], [("0", 0, 6)], [],
])
def test_spans_that_do_not_cover_the_tokens_are_an_error(spans):
    with pytest.raises(ValueError):
        versions_of(spans, 5)


def test_a_version_that_is_no_integer_is_an_error():
    with pytest.raises(ValueError):
        versions_of([("default", 0, 2)], 2)


def test_joining_nothing_gives_an_empty_generation():
    assert join([], "abort").token_ids.shape == (0,)
