"""Who stands where: pure decisions about bundles, shares of GPUs, and who has the memory when."""

import pytest

from lightning_ray.config import Config, ConfigError
from lightning_ray.placement import GPU_SHARE, place, takes_turns


def config(ranks=1, replicas=1, parallel=1, **learner) -> Config:
    return Config(learner={"ranks": ranks, **learner}, generator={"replicas": replicas, "tensor_parallel": parallel})


@pytest.mark.parametrize(("ranks", "replicas", "parallel"), [(1, 1, 1), (4, 4, 1), (4, 1, 4), (8, 2, 4), (8, 4, 2)])
def test_each_gpu_is_shared_by_one_rank_and_one_part_of_a_generator(ranks, replicas, parallel):
    planned = place(config(ranks, replicas, parallel, zero_stage=3), on_gpus=True)
    assert planned.bundles == [{"GPU": 1, "CPU": 2}] * ranks
    assert [seat.bundle for seat in planned.learners] == list(range(ranks))
    taken = [0.0] * ranks
    for seat in planned.learners:
        taken[seat.bundle] += seat.gpus
    for seat in planned.generators:
        if parallel == 1:
            taken[seat.bundle] += seat.gpus
            assert not seat.env
        else:
            assert seat.gpus == 0, "vLLM's own workers take the GPUs"
            for bundle in map(int, seat.env["VLLM_RAY_BUNDLE_INDICES"].split(",")):
                taken[bundle] += float(seat.env["VLLM_RAY_PER_WORKER_GPUS"])
    assert taken == [2 * GPU_SHARE] * ranks


def test_the_parts_of_a_generator_are_neighbours_and_it_stands_on_the_first():
    planned = place(config(4, 2, 2), on_gpus=True)
    assert [seat.bundle for seat in planned.generators] == [0, 2]
    assert [seat.env["VLLM_RAY_BUNDLE_INDICES"] for seat in planned.generators] == ["0,1", "2,3"]


@pytest.mark.parametrize(("ranks", "replicas", "parallel"), [(1, 2, 1), (2, 1, 1), (4, 2, 4)])
def test_ranks_and_parts_that_do_not_agree_are_bad_input(ranks, replicas, parallel):
    with pytest.raises(ConfigError, match=rf"learner\.ranks: {ranks} must equal .*\({replicas} x {parallel}\)"):
        place(config(ranks, replicas, parallel), on_gpus=True)


@pytest.mark.parametrize("on_gpus", [True, False])
def test_every_bundle_of_the_policy_group_has_its_custom_resources(on_gpus):
    planned = place(config(2, 2, resources={"policy": 0.5}), on_gpus=on_gpus)
    assert {bundle["policy"] for bundle in planned.bundles} == {0.5}


def test_sharing_gpu_memory_without_gpus_is_bad_input():
    made = Config(generator={"transport": "ipc"})
    assert place(made, on_gpus=True).bundles
    with pytest.raises(ConfigError, match=r"generator\.transport: ipc .* object_store"):
        place(made, on_gpus=False)


def test_without_gpus_each_part_has_a_bundle_of_its_own():
    planned = place(config(2, 3, 2), on_gpus=False)
    assert planned.bundles == [{"CPU": 1}] * 2 + [{"CPU": 2}] * 3
    seats = [*planned.learners, *planned.generators]
    assert [seat.bundle for seat in seats] == list(range(5))
    assert not any(seat.gpus or seat.env for seat in seats)
    assert all(seat.cpus <= planned.bundles[seat.bundle]["CPU"] for seat in seats)


def test_memory_is_taken_by_turns_on_gpus_unless_said_otherwise():
    for chosen, on_gpus, turns in [("auto", True, True), ("auto", False, False), ("keep", True, False),
                                   ("resend", False, True), ("resend", True, True)]:
        made = Config(generator={"in_flight": chosen})
        assert takes_turns(made, on_gpus=on_gpus) == turns
    assert not takes_turns(Config(learner={"zero_stage": 0}), on_gpus=True)


def test_states_that_cannot_move_are_bad_input():
    with pytest.raises(ConfigError, match=r"generator\.in_flight: resend .* learner\.zero_stage 1, 2 or 3, not 0"):
        Config.build({"generator": {"in_flight": "resend"}, "learner": {"zero_stage": 0}})
