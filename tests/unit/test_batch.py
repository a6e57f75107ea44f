"""Micro-batches: every sample exactly once, the budget held, as many on every rank, nothing lost in the arrays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.learner.batch import (
    MAX_PADDING,
    build,
    part_of,
    plan,
    read_length,
    split_updates,
    update_scale,
    whole_versions,
)
from lightning_ray.trajectory.samples import Sample

LAYOUTS = ["packed", "padded"]


def sample(length: int, trained: list[int], *, rollout: int = 0, weight: float = 1.0, seed: int = 0) -> Sample:
    mask = np.zeros(length, dtype=bool)
    mask[trained] = True
    rng = np.random.default_rng(seed + 1000 * length)
    return Sample(
        token_ids=rng.integers(1, 500, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -rng.random(length), 0).astype(np.float32),
        versions=np.where(mask, rng.integers(0, 5, length), -1).astype(np.int32),
        advantage=float(rng.normal()),
        rollout=rollout,
        weight=weight,
    )


@st.composite
def samples(draw: st.DrawFn) -> list[Sample]:
    made = []
    for index in range(draw(st.integers(1, 20))):
        length = draw(st.integers(2, 60))
        trained = draw(st.lists(st.integers(1, length - 1), unique=True, max_size=5))
        rollout, weight = draw(st.integers(0, 6)), draw(st.floats(0.01, 1))
        made.append(sample(length, trained, rollout=rollout, weight=weight, seed=index))
    return made


@given(samples(), st.sampled_from(LAYOUTS), st.integers(1, 4), st.integers(64, 200))
def test_every_sample_is_placed_once_within_the_budget(
    made: list[Sample], layout: str, ranks: int, budget: int
) -> None:
    lengths = [read_length(s) for s in made]
    indices = [i for i, length in enumerate(lengths) if length]
    shares = plan(lengths, indices, ranks=ranks, budget=budget, layout=layout)
    assert len(shares) == ranks
    assert len({len(share) for share in shares}) == 1
    placed = [i for share in shares for batch in share for i in batch]
    assert sorted(placed) == indices
    for share in shares:
        for batch in share:
            micro = build(made, batch, layout=layout)
            assert micro.input_ids.size <= budget or len(batch) == 1
            assert micro.input_ids.size - sum(micro.lengths) <= MAX_PADDING * micro.input_ids.size
            if layout == "packed":
                assert micro.input_ids.size == sum(micro.lengths)
    assert shares == plan(lengths, indices, ranks=ranks, budget=budget, layout=layout)


@given(samples(), st.sampled_from(LAYOUTS))
def test_law3_each_trained_token_is_in_the_arrays_once(made: list[Sample], layout: str) -> None:
    lengths = [read_length(s) for s in made]
    indices = [i for i, length in enumerate(lengths) if length]
    [share] = plan(lengths, indices, ranks=1, budget=100, layout=layout)
    seen = []
    for batch in share:
        micro = build(made, batch, layout=layout, scale=2.0)
        flat_ids, flat_positions = micro.input_ids.reshape(-1), micro.position_ids.reshape(-1)
        for n in range(len(micro.targets)):
            owner = made[micro.samples[micro.segments[n]]]
            at = flat_positions[micro.select[n]] + 1
            assert owner.loss_mask[at]
            assert micro.targets[n] == owner.token_ids[at]
            assert micro.behaviour[n] == owner.logprobs[at]
            assert micro.versions[n] == whole_versions(owner.versions)[at]
            assert micro.advantages[n] == np.float32(owner.advantage)
            assert micro.weights[n] == np.float32(owner.weight * 2.0)
            # the tokens read up to here are the sample's own
            read = flat_ids[micro.select[n] - at + 1 : micro.select[n] + 1]
            assert read.tolist() == owner.token_ids[:at].tolist()
            seen.append((micro.samples[micro.segments[n]], at))
    wanted = [(i, at) for i in indices for at in np.flatnonzero(made[i].loss_mask)]
    assert sorted(seen) == wanted


@given(samples(), st.integers(1, 4))
def test_updates_keep_rollouts_whole_and_their_weights_together(made: list[Sample], updates: int) -> None:
    parts = split_updates(made, updates)
    trained = [i for i, s in enumerate(made) if s.trained]
    assert sorted(i for part in parts for i in part) == trained
    owners = [{made[i].rollout for i in part} for part in parts]
    assert all(owners)
    assert sum(map(len, owners)) == len(set.union(set(), *owners))
    mass = sum(s.weight * s.trained for s in made)
    for part in parts:
        scaled = update_scale(made, part) * sum(made[i].weight * made[i].trained for i in part)
        assert scaled == pytest.approx(mass)


def test_uneven_ranks_get_empty_micro_batches_that_weigh_nothing() -> None:
    made = [sample(50, [10, 49])]
    shares = plan([read_length(made[0])], [0], ranks=2, budget=64, layout="packed")
    assert shares == [[(0,)], [()]]
    micro = build(made, (), layout="packed")
    assert micro.tokens == 0 and micro.weights.tolist() == [0.0] and micro.versions.tolist() == [-1]


def test_a_sample_is_cut_before_its_last_trained_token() -> None:
    made = [sample(50, [10, 30])]
    assert build(made, (0,), layout="packed").input_ids.shape == (1, 30)


def test_a_sample_longer_than_the_budget_goes_alone() -> None:
    lengths = [500, 20, 30]
    for layout in LAYOUTS:
        [share] = plan(lengths, [0, 1, 2], ranks=1, budget=64, layout=layout)
        assert (0,) in share


def test_mixed_lengths_are_padded_by_at_most_five_percent() -> None:
    lengths = np.random.default_rng(0).integers(60, 250, 128).tolist()
    [share] = plan(lengths, range(128), ranks=1, budget=8192, layout="padded")
    area = sum(len(batch) * max(lengths[i] for i in batch) for batch in share)
    assert 1 - sum(lengths) / area <= MAX_PADDING
    assert len(share) < 20


def test_a_first_token_cannot_be_trained() -> None:
    with pytest.raises(ValueError, match="first token"):
        read_length(sample(5, [0, 3]))


@pytest.mark.parametrize(("versions", "whole"), [
    ([-1, 3, 3, -1, 4, 4], [-1, 3, 3, -1, 4, 4]),
    ([-1, 3, 4, 4, -1, 4], [-1, 3, -1, -1, -1, 4]),
    ([2, 2, 3], [2, 2, -1]),
    ([-1, -1], [-1, -1]),
])
def test_tokens_sampled_on_an_older_policys_cache_belong_to_no_one_policy(versions, whole):
    assert whole_versions(np.array(versions, np.int32)).tolist() == whole


# --- parts of a micro-batch, for ranks that split sequences ---


@given(samples(), st.integers(1, 5))
def test_parts_make_up_the_micro_batch(made: list[Sample], size: int) -> None:
    indices = [index for index, sample in enumerate(made) if read_length(sample)]
    batch = build(made, indices, layout="packed")
    parts = [part_of(batch, position, size) for position in range(size)]
    width = batch.input_ids.shape[1]
    together = np.concatenate([part.input_ids for part in parts], axis=1)
    assert len({part.input_ids.shape for part in parts}) == 1 and together.shape[1] < width + size
    assert (together[:, :width] == batch.input_ids).all()
    positions = np.concatenate([part.position_ids for part in parts], axis=1)
    assert (positions[:, :width] == batch.position_ids).all()
    for part in parts:
        assert sum(part.lengths) == together.shape[1] and part.lengths[: len(batch.lengths)] == batch.lengths
        assert len(part.select) >= 1 and (part.select < part.input_ids.shape[1]).all()
    if not indices:
        return
    assert np.concatenate([part.own for part in parts]).tolist() == list(range(len(batch.targets)))
    for number, part in enumerate(parts):
        where = part.select[: len(part.own)] + number * part.input_ids.shape[1]
        assert (where == batch.select[part.own]).all()
        assert (part.targets[: len(part.own)] == batch.targets[part.own]).all()


@pytest.mark.parametrize("size", [2, 3])
def test_an_empty_micro_batch_gives_every_rank_something_to_read(size: int) -> None:
    batch = build([], (), layout="packed")
    for position in range(size):
        part = part_of(batch, position, size)
        assert part.input_ids.shape == (1, 1) and part.select.tolist() == [0]
