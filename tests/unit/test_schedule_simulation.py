"""The simulation behind `benchmarks/schedule.py`: its queue is exact, and the schedules keep their promises in it."""

import math

import pytest

from benchmarks.schedule import row_of
from benchmarks.schedules.simulation import SCHEDULES, Engines, Simulation, Work


def test_sequences_share_the_engines_exactly():
    """Two sequences on one GPU, then the longer one alone."""
    engines = Engines(gpus=1, work=Work(step_s=0.02, step_s_per_sequence=0.001))
    engines.add(100, "short"), engines.add(300, "long")
    both, alone = 0.022, 0.021
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
    results = {name: Simulation(name, *row_of("8x64/2"), 4, Work()).run() for name in SCHEDULES}
    assert results["synchronous"]["age"] == 0 == results["synchronous"]["stale"]
    assert results["continue"]["age"] > 0
    rates = [results[name]["tokens_per_s"] for name in ("continue", "drain", "synchronous")]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_update_trains_whole_groups_once(schedule):
    simulation = Simulation(schedule, *row_of("8x64/2"), 3, Work())
    simulation.run()
    assert len(simulation.ages) == 3 * simulation.per_step
    assert simulation.version == 3
