"""The generator with real vLLM in a Ray actor: sampling, aborting, freezing, and weights that change under it."""

import time

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm.sampling_params import StructuredOutputsParams

from lightning_ray.config import ConfigError, GeneratorConfig, PolicyConfig
from lightning_ray.generator.engine import engine_arguments
from lightning_ray.generator.publishing import PublishFailed
from lightning_ray.generator.request import GenerateRequest
from lightning_ray.learner.buckets import Bucket
from lightning_ray.learner.tally import tally_of

pytestmark = pytest.mark.timeout(300)
PROMPT = list(range(20, 60))


class Weights:
    """A reference model in float32, whose weights can be disturbed and sent."""

    def __init__(self, directory):
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    @torch.no_grad()
    def disturb(self, seed: int, scale: float = 0.05) -> "Weights":
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * scale
        return self

    def sent(self) -> dict:
        """As in a `Bucket`."""
        return {name: (parameter.detach().numpy().reshape(-1).view(np.uint8), "float32", tuple(parameter.shape))
                for name, parameter in self.model.named_parameters() if name != "lm_head.weight"}

    @torch.no_grad()
    def logprobs(self, prompt, sampled, temperature) -> np.ndarray:
        logits = self.model(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1:-1]
        return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(sampled)[:, None])[:, 0].numpy()

    @torch.no_grad()
    def greedy(self, prompt, length) -> list[int]:
        ids = list(prompt)
        for _ in range(length):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt):]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def versions():
    """Policy versions that no other test uses."""
    return iter(range(1000, 2000))


def publish(generator, weights: dict, version: int, *, buckets: int = 1) -> dict:
    names = list(weights)
    parts = [{name: weights[name] for name in names[start::buckets]} for start in range(buckets)]
    ray.get(generator.freeze.remote())
    report = send(generator, parts, version)
    ray.get(generator.thaw.remote())
    return report


def send(generator, parts: list[dict], version: int) -> dict:
    for number, part in enumerate(parts, 1):
        report = ray.get(load(generator, ray.put(bucket(part)), version, first=number == 1, last=number == len(parts)))
    return report


def bucket(arrays: dict) -> Bucket:
    tensors = Bucket(arrays, {}).open(torch.device("cpu"))
    return Bucket(arrays, tally_of(tensors.items()))


def load(generator, ref: ray.ObjectRef, version: int, *, first: bool = True, last: bool = True) -> ray.ObjectRef:
    return generator.load_bucket.remote(version, [ref], first, last)


@pytest.fixture
def known(generator, tiny_model_dir, versions):
    """The generator holds these weights, at the version that comes with them."""
    weights, version = Weights(tiny_model_dir).disturb(0), next(versions)
    publish(generator, weights.sent(), version)
    return weights, version


def wait_until(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def in_flight(generator) -> int:
    return ray.get(generator.health.remote())["in_flight"]


def sampling(generator) -> int:
    """Generations that have tokens, and not all of them yet."""
    health = ray.get(generator.health.remote())
    return health["in_flight"] - health["waiting"]


def arguments(tmp_path, **settings):
    (tmp_path / "config.json").write_text("{}")
    return engine_arguments(str(tmp_path), GeneratorConfig(**settings), PolicyConfig(path=tmp_path, max_context=777), 5)


def test_settings_reach_the_engine(tmp_path):
    extra = {"block_size": 32, "enable_prefix_caching": False}
    made = arguments(tmp_path, dtype="float32", max_num_seqs=9, extra=extra)
    assert (made.dtype, made.max_num_seqs, made.max_model_len, made.seed, made.block_size) == ("float32", 9, 777, 5, 32)
    assert made.logprobs_mode == "processed_logprobs", "behaviour log-probs are those of the sampling distribution"
    assert made.enable_prefix_caching is False, "what is given in extra wins"


def test_an_unknown_engine_argument_is_bad_input(tmp_path):
    with pytest.raises(ConfigError, match=r"generator\.extra: vLLM has no engine argument max_num_sequences"):
        arguments(tmp_path, extra={"max_num_sequences": 3})


def test_the_facts_say_what_was_started(generator):
    facts = ray.get(generator.ready.remote())
    assert facts["max_model_len"] == 1024 and facts["vocabulary"] == 512
    assert facts["kv_tokens"] >= 32 * 1024


def test_it_runs_on_asyncios_own_loop(generator, rings_of):
    assert rings_of(generator) == 0


def test_log_probs_are_those_of_the_distribution_that_was_sampled_from(known, generator, request_for):
    weights, version = known
    for temperature in (0.7, 1.3):
        answer = ray.get(generator.generate.remote(request_for(PROMPT, 60, temperature)))
        assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions) == 60
        assert answer.finish_reason == "length" and set(answer.versions) == {version}
        gap = np.abs(weights.logprobs(PROMPT, answer.token_ids.tolist(), temperature) - answer.logprobs)
        assert gap.mean() < 1e-3 and gap.max() < 1e-2


@pytest.mark.gpu  # on the CPU requests share the engine's random stream, see generator/engine.py
def test_a_seed_repeats_itself_and_another_does_not(generator, request_for):
    first, again, other = ray.get([
        generator.generate.remote(request_for(PROMPT, 30, 1.0, seed=seed)) for seed in (5, 5, 6)])
    assert first.token_ids.tolist() == again.token_ids.tolist() != other.token_ids.tolist()


def test_stop_tokens_end_a_generation_and_are_returned(known, generator, request_for):
    greedy = known[0].greedy(PROMPT, 12)
    last = greedy.index(greedy[6])
    answer = ray.get(generator.generate.remote(request_for(PROMPT, 12, 0.0, stop_token_ids=[greedy[6]])))
    assert answer.token_ids.tolist() == greedy[:last + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", greedy[6])


def test_stop_strings_end_a_generation(known, generator, request_for, tiny_model_dir):
    greedy = known[0].greedy(PROMPT, 12)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    at = next(index for index in range(3, 12) if len(tokenizer.decode(greedy[index]).strip("\ufffd \n")) > 0)
    stop = tokenizer.decode(greedy[at])
    answer = ray.get(generator.generate.remote(request_for(PROMPT, 12, 0.0, stop=[stop])))
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.token_ids.tolist() == greedy[:len(answer.token_ids)] and len(answer.token_ids) <= at + 1


def test_a_constraint_holds(generator, request_for):
    choice = StructuredOutputsParams(choice=["yes, 1 + 1 = 2", "no"])
    answers = ray.get([generator.generate.remote(request_for(
        PROMPT, 40, ignore_eos=False, params={"structured_outputs": choice})) for _ in range(4)])
    assert {answer.finish_reason for answer in answers} == {"stop"}
    assert all(2 <= len(answer.token_ids) <= 16 and np.isfinite(answer.logprobs).all() for answer in answers)


def test_the_context_ends_a_generation(generator, request_for):
    answer = ray.get(generator.generate.remote(request_for([7] * 1000, 200)))
    assert len(answer.token_ids) == 24 and answer.finish_reason == "length"


@pytest.mark.parametrize(("prompt", "params", "message"), [
    ([7] * 1024, {}, "maximum model length"), ([7], {"no_such_parameter": 1}, "no_such_parameter"),
    ([7], {"top_p": 3.0}, "top_p"), ([], {}, "no tokens"),
])
def test_what_cannot_be_served_is_a_value_error(generator, request_for, prompt, params, message):
    with pytest.raises(ValueError, match=message):
        ray.get(generator.generate.remote(request_for(prompt, 8, params=params)))
    assert in_flight(generator) == 0


def test_one_id_cannot_be_in_flight_twice(generator, request_for):
    request = request_for(PROMPT, 400)
    running = generator.generate.remote(request)
    wait_until(lambda: in_flight(generator) == 1)
    with pytest.raises(ValueError, match="in flight already"):
        ray.get(generator.generate.remote(request))
    ray.get(generator.abort.remote(request.request_id))
    assert ray.get(running).finish_reason == "abort"


def test_an_aborted_generation_ends_with_what_it_has(generator, request_for):
    request = request_for(PROMPT, 900)
    running = generator.generate.remote(request)
    wait_until(lambda: sampling(generator) == 1)
    ray.get(generator.abort.remote(request.request_id))
    answer = ray.get(running)
    assert answer.finish_reason == "abort" and 0 < len(answer.token_ids) < 900
    assert len(answer.token_ids) == len(answer.logprobs) == len(answer.versions)


def test_law1_what_was_sampled_for_a_caller_that_died_can_be_claimed_once(generator, request_for):
    request = request_for(PROMPT, 900)
    running = generator.generate.remote(request)
    wait_until(lambda: sampling(generator) == 1)
    claimed = ray.get(generator.claim.remote(request.request_id))
    assert claimed.finish_reason == "abort" and 0 < len(claimed.token_ids) < 900
    assert claimed.token_ids.tolist() == ray.get(running).token_ids.tolist()
    ended = request_for(PROMPT, 5)
    answer = ray.get(generator.generate.remote(ended))
    assert ray.get(generator.claim.remote(ended.request_id)).token_ids.tolist() == answer.token_ids.tolist()
    for request_id in (request.request_id, ended.request_id, "there is no such request"):
        assert ray.get(generator.claim.remote(request_id)) is None


def test_an_abort_of_nothing_is_no_error(generator):
    ray.get(generator.abort.remote("there is no such request"))


def test_a_cancelled_call_leaves_nothing_in_flight(generator, request_for):
    running = generator.generate.remote(request_for(PROMPT, 900))
    wait_until(lambda: in_flight(generator) == 1)
    ray.cancel(running)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        ray.get(running)
    wait_until(lambda: in_flight(generator) == 0)


def test_control_calls_pass_hundreds_of_waiting_generations(generator, request_for):
    requests = [request_for(PROMPT, 900) for _ in range(300)]
    running = [generator.generate.remote(request) for request in requests]
    wait_until(lambda: in_flight(generator) == 300)
    started = time.monotonic()
    ray.get(generator.freeze.remote())
    assert time.monotonic() - started < 20, "a control call waited behind generations"
    ray.get([generator.abort.remote(request.request_id) for request in requests])
    assert {answer.finish_reason for answer in ray.get(running)} == {"abort"}
    ray.get(generator.thaw.remote())


def test_frozen_generations_go_on_where_they_were_and_new_ones_wait(known, generator, request_for):
    running = generator.generate.remote(request_for(PROMPT, 300, 0.0))
    wait_until(lambda: sampling(generator) == 1)
    ray.get(generator.freeze.remote())
    ray.get(generator.freeze.remote())
    late = generator.generate.remote(request_for(PROMPT, 10, 0.0))
    ready, _ = ray.wait([running, late], timeout=0.5)
    assert not ready, "frozen: nothing is sampled"
    aborted = request_for(PROMPT, 10)
    waiting = generator.generate.remote(aborted)
    wait_until(lambda: in_flight(generator) == 3)
    ray.get(generator.abort.remote(aborted.request_id))
    assert len(ray.get(waiting, timeout=60).token_ids) == 0, "an abort need not wait for the thaw"
    ray.get(generator.thaw.remote())
    whole = known[0].greedy(PROMPT, 10)
    assert ray.get(late).token_ids.tolist() == whole
    assert len(ray.get(running).token_ids) == 300 and ray.get(running).token_ids[:10].tolist() == whole


def test_law_4_a_running_generation_crosses_an_update_at_full_length(
        known, generator, request_for, tiny_model_dir, versions):
    old = known[1]
    running = [generator.generate.remote(request_for(PROMPT, 400)) for _ in range(32)]
    wait_until(lambda: sampling(generator) == 32)  # some tokens, far from all: 12,800 take seconds
    new = next(versions)
    ray.get(generator.freeze.remote())
    late = generator.generate.remote(request_for(PROMPT, 20))
    send(generator, [Weights(tiny_model_dir).disturb(1).sent()], new)
    ray.get(generator.thaw.remote())
    for answer in ray.get(running):
        assert len(answer.token_ids) == 400 and answer.finish_reason == "length"
        assert set(answer.versions) == {old, new} and np.all(np.diff(answer.versions) >= 0)
    assert set(ray.get(late).versions) == {new}, "a request that waited belongs to the new weights"


def test_law_4_memory_is_given_up_and_generations_are_sent_again_with_their_tokens(
        known, generator, request_for, tiny_model_dir, versions):
    (weights, old), new = known, next(versions)
    changed = Weights(tiny_model_dir).disturb(6)
    requests = [request_for(PROMPT, 300) for _ in range(12)]
    running = [generator.generate.remote(request) for request in requests]
    wait_until(lambda: sampling(generator) == 12)
    ray.get(generator.freeze.remote(True))
    ray.get(generator.freeze.remote(True))
    assert ray.get(generator.health.remote())["kv_share"] == 0, "the engine still holds generations"
    assert send(generator, [changed.sent()], new)["verified"]
    ray.get(generator.thaw.remote())
    for answer in ray.get(running):
        assert len(answer.token_ids) == 300 and answer.finish_reason == "length"
        assert set(answer.versions) == {old, new} and np.all(np.diff(answer.versions) >= 0)
        before = int((answer.versions == old).sum())
        ids = answer.token_ids.tolist()
        for model, part in ((weights, slice(0, before)), (changed, slice(before, None))):
            gap = np.abs(model.logprobs(PROMPT, ids, 0.8)[part] - answer.logprobs[part])
            assert gap.mean() < 1e-3, "a token was sampled on KV of other weights, or at another place"


def test_memory_is_given_up_and_nothing_is_published(known, generator, request_for):
    running = generator.generate.remote(request_for(PROMPT, 200, 0.0))
    wait_until(lambda: sampling(generator) == 1)
    ray.get(generator.freeze.remote(True))
    ray.get(generator.thaw.remote())
    assert ray.get(running).token_ids[:10].tolist() == known[0].greedy(PROMPT, 10)


def test_what_had_no_token_yet_belongs_to_the_new_weights(generator, request_for, tiny_model_dir, versions):
    weights = Weights(tiny_model_dir).disturb(3)
    requests = [request_for(PROMPT, 900) for _ in range(32)]  # as many as run at once
    running = [generator.generate.remote(request) for request in requests]
    wait_until(lambda: sampling(generator) == 32)
    late = [generator.generate.remote(request_for(PROMPT, 60)) for _ in range(70)]  # they wait in the engine
    wait_until(lambda: in_flight(generator) == 102)
    new = next(versions)
    publish(generator, weights.sent(), new)
    ray.get([generator.abort.remote(request.request_id) for request in requests])
    assert not any(set(answer.versions) == {new} for answer in ray.get(running))
    answers = ray.get(late)
    assert all(len(answer.token_ids) == 60 and set(answer.versions) == {new} for answer in answers)
    for answer in answers[::20]:
        gap = np.abs(weights.logprobs(PROMPT, answer.token_ids.tolist(), 0.8) - answer.logprobs)
        assert gap.mean() < 1e-3, "it was sampled on KV of older weights"


def test_an_update_is_verified_and_changes_what_is_sampled(known, generator, request_for, tiny_model_dir, versions):
    before = ray.get(generator.generate.remote(request_for(PROMPT, 12, 0.0))).token_ids.tolist()
    assert before == known[0].greedy(PROMPT, 12)
    weights, version = Weights(tiny_model_dir).disturb(2), next(versions)
    report = publish(generator, weights.sent(), version, buckets=3)
    assert report["verified"] and not report["unverified"] and report["version"] == version
    assert report["tensors"] == len(weights.sent())
    assert report["bytes"] == sum(raw.nbytes for raw, _, _ in weights.sent().values())
    after = ray.get(generator.generate.remote(request_for(PROMPT, 12, 0.0))).token_ids.tolist()
    assert after == weights.greedy(PROMPT, 12) != before, "prefix cache of older weights, or a part left as it was"


@pytest.mark.parametrize("missing", [
    "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight",
])
def test_an_incomplete_publish_is_refused_until_one_succeeds(generator, request_for, tiny_model_dir, versions, missing):
    weights = Weights(tiny_model_dir).disturb(4)
    sent = weights.sent()
    incomplete = {name: tensor for name, tensor in sent.items() if name != missing}
    assert len(incomplete) == len(sent) - 1
    with pytest.raises(PublishFailed):
        publish(generator, incomplete, next(versions))
    with pytest.raises(PublishFailed, match="publish again"):
        ray.get(generator.thaw.remote())
    assert publish(generator, sent, next(versions))["verified"]
    answer = ray.get(generator.generate.remote(request_for(PROMPT, 8, 0.0)))
    assert answer.token_ids.tolist() == weights.greedy(PROMPT, 8)


def test_publishing_needs_a_frozen_generator(generator):
    with pytest.raises(RuntimeError, match="must be frozen"):
        ray.get(load(generator, ray.put(bucket({})), 5))


def test_a_publish_that_broke_off_can_be_repeated(generator, request_for, tiny_model_dir, versions):
    weights = Weights(tiny_model_dir).disturb(5)
    sent = weights.sent()
    unknown = {**dict(list(sent.items())[:5]), "model.layers.7.no_such.weight": sent["model.norm.weight"]}
    with pytest.raises(PublishFailed, match="no module or parameter"):
        publish(generator, unknown, next(versions))
    assert publish(generator, sent, next(versions))["verified"]
    answer = ray.get(generator.generate.remote(request_for(PROMPT, 8, 0.0)))
    assert answer.token_ids.tolist() == weights.greedy(PROMPT, 8)


def test_published_weights_leave_the_object_store(generator, tiny_model_dir, versions):
    ray.get(generator.freeze.remote())
    ref = ray.put(bucket(Weights(tiny_model_dir).sent()))
    name = ref.hex().encode()
    ray.get(load(generator, ref, next(versions)))
    ray.get(generator.thaw.remote())
    counts = ray._private.worker.global_worker.core_worker.get_all_reference_counts
    assert name in counts()
    del ref
    wait_until(lambda: name not in counts())


def test_seeded_requests_whose_prompts_are_processed_in_pieces_do_not_kill_the_engine(generator):
    """Their prompts together exceed one engine step, so that some are processed in pieces."""
    requests = [GenerateRequest(f"seeded-{number}", [1 + (number + place) % 100 for place in range(200)], 4, 1.0,
                                seed=number) for number in range(48)]
    done = ray.get([generator.generate.remote(request) for request in requests])
    assert all(len(generation.token_ids) for generation in done)
