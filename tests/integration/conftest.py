"""One Ray, one engine and one learner for the whole test session, on a tiny random model.

* `ray_session`: a local Ray with room for everything; what is running already is used.
* `tiny_model_dir`: the directory of a tiny `qwen3` (tied embeddings) with tokenizer and chat template.
* `policy_group`: a started `PolicyGroup` on it; `generator`: its one `GeneratorWorker`.

Tests share these: they leave the generator thawed, and take its policy version as they find it.
"""

import itertools
import os
from pathlib import Path

import pytest

from lightning_ray.ray_session import start_local
from tests.tiny_models import tiny_model

TEMPERATURE = 0.8


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("models"), "qwen3")


@pytest.fixture(scope="session")
def ray_session():
    import ray

    own = not ray.is_initialized()
    if own:
        start_local(8, 200 << 20)
    yield
    if own:
        ray.shutdown()


@pytest.fixture(scope="session")
def policy_config(tiny_model_dir):
    from lightning_ray.config import Config

    return Config(
        policy={"path": tiny_model_dir, "max_context": 1024}, sampling={"temperature": TEMPERATURE},
        generator={"dtype": "float32", "max_num_seqs": 32,
                   "extra": {"kv_cache_memory_bytes": 128 << 20, "enable_chunked_prefill": False}},
        learner={"lr": 1e-3, "warmup_steps": 0, "threads": 1},
    )


@pytest.fixture(scope="session")
def policy_group(ray_session, policy_config, tiny_model_dir):
    from lightning_ray.policy_group import PolicyGroup

    group = PolicyGroup.start(policy_config, tiny_model_dir, total_steps=100)
    try:
        group.ready()
        yield group
    finally:
        group.shutdown()


@pytest.fixture
def by_turns(policy_group):
    """The group, whose learner and generator have the memory of their devices by turns for as long as a test runs."""
    policy_group._turns = True
    yield policy_group
    policy_group._learners_do("reload")
    policy_group._turns = False


@pytest.fixture(scope="session")
def generator(policy_group):
    return policy_group.generators[0]


@pytest.fixture
def rings_of():
    """Counts the io_uring instances in an actor's process: each event loop of uvloop's has one."""
    import ray
    import uvloop

    def count(pid) -> int:
        links = Path(f"/proc/{pid}/fd").iterdir()
        return sum("io_uring" in os.readlink(link) for link in links if os.path.lexists(link))

    loop = uvloop.new_event_loop()
    found = count(os.getpid())
    loop.close()
    if not found:
        pytest.skip("this kernel gives uvloop no io_uring")
    return lambda actor: count(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())))


@pytest.fixture(scope="session")
def request_for():
    """Makes a `GenerateRequest` with an id of its own: `request_for(prompt_ids, max_tokens, **fields)`."""
    from lightning_ray.generator.request import GenerateRequest

    ids = itertools.count()

    def make(prompt_ids, max_tokens, temperature=TEMPERATURE, *, ignore_eos=True, params=(), **fields):
        return GenerateRequest(f"test-{next(ids)}", list(prompt_ids), max_tokens, temperature,
                               params={"ignore_eos": ignore_eos, **dict(params)}, **fields)

    return make
