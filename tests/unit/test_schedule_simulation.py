"""The simulation behind `benchmarks/schedule.py`: its queue is exact, and the schedules keep their promises in it."""

import math

import pytest

from benchmarks.schedule import SCHEDULES, STEP_S, STEP_S_PER_SEQUENCE, Engines, Simulation


def test_sequences_share_the_engines_exactly():
    """Two sequences on one GPU, then the longer one alone."""
    engines = Engines(gpus=1)
    engines.add(100, "short"), engines.add(300, "long")
    both, alone = STEP_S + 2 * STEP_S_PER_SEQUENCE, STEP_S + STEP_S_PER_SEQUENCE
    assert engines.next_end() == pytest.approx(100 * both)
    engines.advance(engines.next_end())
    assert engines.end_one() == "short"
    assert engines.next_end() == pytest.approx(100 * both + 200 * alone)
    engines.frozen = True
    assert engines.next_end() == math.inf
    engines.advance(engines.clock + 50)
    engines.frozen = False
    assert engines.next_end() == pytest.approx(50 + 100 * both + 200 * alone)


def test_schedules_keep_their_promises():
    results = {name: Simulation(name, 8, 64, 4, (180.0, 0.9)).run() for name in SCHEDULES}
    assert results["synchronous"]["age"] == 0 == results["synchronous"]["stale"]
    assert results["continue"]["age"] > 0
    rates = [results[name]["tokens_per_s"] for name in ("continue", "drain", "synchronous")]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_update_trains_whole_groups_once(schedule):
    simulation = Simulation(schedule, 8, 64, 3, (180.0, 0.9))
    simulation.run()
    assert len(simulation.ages) == 3 * simulation.per_step
    assert simulation.version == 3
