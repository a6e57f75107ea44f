"""Admission: bounds, direction, and that it settles where the generators are full."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.admission import Admission, Pressure

PRESSURES = st.builds(
    lambda in_flight, share, kv: Pressure(in_flight, int(in_flight * share), kv),
    st.integers(0, 500), st.floats(0, 1), st.floats(0, 1.5))
IDLE = Pressure(4, 0, 0.1)
FULL = Pressure(100, 60, 0.5)


@given(st.integers(1, 50), st.integers(0, 500), st.lists(st.tuples(PRESSURES, st.integers(0, 600)), max_size=60))
def test_the_limit_keeps_its_bounds_and_its_direction(low, more, looks):
    admission = Admission(low, low + more)
    for pressure, running in looks:
        before = admission.limit
        after = admission.look(pressure, running)
        assert low <= after <= low + more
        if pressure.high:
            assert after < before or after == low
        elif running < before or not pressure.low:
            assert after == before
        else:
            assert after > before or after == low + more


def test_without_pressure_it_doubles_to_the_upper_bound():
    admission = Admission(8, 1000)
    limits = [admission.look(IDLE, admission.limit) for _ in range(8)]
    assert limits == [16, 32, 64, 128, 256, 512, 1000, 1000]


def test_pressure_that_stays_brings_it_down_to_the_lower_bound():
    admission = Admission(8, 1000)
    admission.limit = 1000
    assert [admission.look(FULL, 1000) for _ in range(30)][-1] == 8


@given(st.integers(20, 2000))
def test_it_settles_where_the_generators_are_full(capacity):
    """A generator that holds `capacity` rollouts lets the others wait."""
    admission = Admission(1, 4096)
    limits = []
    for _ in range(200):
        running = admission.limit
        pressure = Pressure(running, max(0, running - capacity), min(1.0, running / capacity))
        limits.append(admission.look(pressure, running))
    settled = limits[100:]
    assert min(settled) >= 0.55 * capacity and max(settled) <= 1.1 * capacity


def test_the_fullest_generator_counts():
    health = [{"in_flight": 4, "waiting": 0, "kv_share": 0.2}, {"in_flight": 6, "waiting": 1, "kv_share": 0.95}]
    pressure = Pressure.of(health)
    assert (pressure.in_flight, pressure.waiting, pressure.kv_share, pressure.high) == (10, 1, 0.95, True)


def test_bounds_are_checked():
    with pytest.raises(ValueError, match="low <= high"):
        Admission(5, 4)
