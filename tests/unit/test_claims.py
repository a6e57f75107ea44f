"""Generations whose caller died are kept for a while, and given away once."""

from lightning_ray.generator.claims import KEPT_S, Ended
from lightning_ray.generator.request import join


def test_law1_an_ended_generation_is_kept_for_a_while_and_given_once():
    now = 0.0
    ended = Ended(clock=lambda: now)
    one, other = join([], "stop"), join([], "abort")
    assert ended.keep("one", one) is one
    now = KEPT_S
    ended.keep("other", other)
    assert ended.take("one") is one and ended.take("one") is None
    now = 2 * KEPT_S + 1
    ended.keep("late", one)
    assert ended.take("other") is None and ended.take("late") is one
