import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ray.statistics import pass_rate


def test_known_values():
    """Wilson's interval for 10 of 20, from the closed form by hand: 0.5 +- 0.2008."""
    assert pass_rate(10, 20)["ci95"] == pytest.approx([0.2993, 0.7007], abs=1e-4)
    assert pass_rate(0, 10)["ci95"] == pytest.approx([0.0, 0.2775], abs=1e-4)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_rate_lies_in_its_interval(counts):
    result = pass_rate(*counts)
    low, high = result["ci95"]
    assert 0 <= low <= result["rate"] <= high <= 1


def test_impossible_counts_are_refused():
    for counts in ((1, 0), (5, 4), (-1, 4)):
        with pytest.raises(ValueError, match="no rate"):
            pass_rate(*counts)
