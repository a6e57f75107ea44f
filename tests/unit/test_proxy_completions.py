"""OpenAI Completions through HTTP, with the real openai client."""

import openai
import pytest

from tests.unit.proxy_parts import codec_of, serving


@pytest.fixture
async def started():
    async with serving(lambda url: openai.AsyncOpenAI(base_url=url + "/v1", api_key="any", max_retries=0)) as start:
        yield start


async def test_law2_texts_go_on_token_for_token(started):
    answers = iter(["One.", "Two\\", "Three."])
    server, _, _, client = await started("chatml", lambda request: next(answers))
    text = "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\n"
    first = await client.completions.create(model="policy", prompt=text, max_tokens=50)
    assert (first.choices[0].text, first.choices[0].finish_reason) == ("One.", "stop")
    text += first.choices[0].text + "<|im_end|>\n<|im_start|>user\nOn.<|im_end|>\n<|im_start|>assistant\n"
    second = await client.completions.create(model="policy", prompt=text, max_tokens=50)
    assert second.choices[0].finish_reason == "length"
    third = await client.completions.create(model="policy", prompt=text + "Two and", max_tokens=50)
    assert third.choices[0].text == "Three."
    calls = await server.finish("r0")
    assert [(call.relation, call.parent) for call in calls] == [
        ("new_conversation", None), ("continued", 0), ("continued", 1),
    ]
    decode = codec_of("chatml").decode
    assert decode(calls[2].prompt_ids.tolist()) == text + "Two and"
    controls = set(codec_of("chatml").specials.texts.values())
    assert sum(token in controls for token in calls[0].prompt_ids) == 3  # the harness is the template


async def test_law2_token_ids_go_on(started):
    answers = iter(["One.", "Two.", "Else."])
    server, _, _, client = await started("chatml", lambda request: next(answers))
    ids = codec_of("chatml").specials.encode_raw("count ").tolist()
    await client.completions.create(model="policy", prompt=ids, max_tokens=50)
    sampled = [*codec_of("chatml").specials.encode("One.").tolist(), codec_of("chatml").tokenizer.eos_token_id]
    await client.completions.create(model="policy", prompt=[*ids, *sampled, 300], max_tokens=50)
    await client.completions.create(model="policy", prompt=[*ids, 301], max_tokens=50)
    one, two, three = await server.finish("r0")
    assert (one.relation, two.relation, three.relation) == ("new_conversation", "continued", "new_conversation")
    assert two.prompt_ids.tolist() == [*ids, *sampled, 300]


async def test_several_prompts_streams_and_logprobs(started):
    server, _, _, client = await started("chatml", lambda request: f"{len(request.prompt_ids)}")
    prompts = ["a", "b and b"]
    whole = await client.completions.create(model="policy", prompt=prompts, n=2, logprobs=0, max_tokens=50)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text == whole.choices[1].text != whole.choices[2].text
    assert whole.choices[0].logprobs.token_logprobs == [-0.5, -0.5]
    stream = await client.completions.create(
        model="policy", prompt=prompts, n=2, stream=True, stream_options={"include_usage": True}, max_tokens=50
    )
    chunks = [chunk async for chunk in stream]
    assert [c.choices[0].text for c in chunks[:-1]] == [choice.text for choice in whole.choices]
    assert chunks[-1].usage == whole.usage
    assert len(await server.finish("r0")) == 8


async def test_what_cannot_be_honoured_is_refused(started):
    _, _, _, client = await started("chatml", lambda request: "x")
    for wrong, param in [({"echo": True}, "echo"), ({"suffix": "x"}, "suffix"), ({"logprobs": 3}, "logprobs"),
                         ({"prompt": [9999]}, "prompt"), ({"prompt": ""}, "prompt"), ({"best_of": 3}, "best_of")]:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(**{"model": "policy", "prompt": "x", **wrong})
        assert refused.value.param in (param, None), wrong
