"""What `benchmarks/schedule.py` makes of a real run: figures of a schedule and constants of the simulation."""

import random

import numpy as np
import pytest

from benchmarks.schedules.calibration import Timeline, decoding_rate, errors, quantiles
from benchmarks.schedules.simulation import PROBABILITIES, SCHEDULES, Simulation, Work, bounded, drawn


def answer(began, ended, tokens=10, status=200, rollout="g0-r0"):
    return {"what": "answer", "rollout": rollout, "began": began, "ended": ended, "tokens": tokens, "status": status}


def seen(*lines, wall_s=10.0, updates=(), calls=None):
    return {"lines": lines, "wall_s": wall_s, "updates": updates, "calls": calls or {}}


class Observed(Simulation):
    """Leaves the record that a real run leaves."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.lines, self.updates, self.asked = [], [], {}

    def ask(self, one):
        self.asked.setdefault(one.rollout_id, self.now)
        super().ask(one)

    def answered(self, one):
        self.lines.append(answer(self.asked.pop(one.rollout_id), self.now, one.calls[0][0]))
        super().answered(one)

    def decide(self):
        before = self.updating
        super().decide()
        if self.updating and not before:
            self.began = self.now

    def happened(self, what):
        if what == "updated":
            self.updates.append((self.began, self.learning_since, self.now))
        super().happened(what)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_record_of_a_simulated_run_gives_its_figures_and_constants(schedule):
    work = Work(step_s=0.0025, step_s_per_sequence=0.00012, prefill_steps=8, calls=(3, 0.05), answers=(70, 1.1),
                most_tokens=1024, tools=(0.25, 1.16), start_s=0.04, turn_s=0.015, end_s=0.04, processors=1,
                learn_gpu_s=0.04, change_s=0.3)
    run = Observed(schedule, 1, 2, 8, 12, work)
    result = run.run()
    timeline = Timeline(seen(*run.lines, wall_s=result["wall_s"], updates=run.updates))
    assert timeline.idle == pytest.approx(result["idle"], abs=0.02)
    assert timeline.sequences == pytest.approx(result["sequences"], rel=0.05)
    step, more, prefill = decoding_rate(timeline.decoding())
    assert (step, more) == pytest.approx((0.0025, 0.00012), rel=0.15)
    assert prefill == pytest.approx(8, abs=4)


def test_time_without_requests_is_idle_and_time_of_an_update_is_not():
    timeline = Timeline(seen(answer(1, 4), answer(2, 8), updates=[(5, 5, 7)]))
    assert timeline.learning_s == 2
    assert timeline.busy_s == 7 - 2
    assert timeline.idle == pytest.approx(1 - (5 + 2) / 10)
    assert timeline.sequences == pytest.approx((3 + 4) / 5)
    (first, (_, seconds, running)) = timeline.decoding()
    assert first == (10, 3, pytest.approx(5 / 3))
    assert seconds == 4 and running == pytest.approx(6 / 4)


def test_a_request_that_waits_for_the_thaw_is_in_flight_from_there_and_a_drained_one_until_its_end():
    timeline = Timeline(seen(answer(1, 4), answer(3, 8), updates=[(2, 4, 6)]))
    assert timeline.decoding() == [(10, 3, 1), (10, 2, 1)]
    assert timeline.busy_s == 3 + 2


def test_what_runs_beyond_the_last_update_counts_until_there():
    timeline = Timeline(seen(answer(8, 14)))
    assert timeline.busy_s == 2 and timeline.decoding() == []


def test_decoding_constants_are_found_again():
    rng = np.random.default_rng(0)
    tokens, running = rng.integers(1, 1000, 300), rng.uniform(1, 90, 300)
    seconds = (tokens + 12) * (0.003 + 0.0002 * running)
    assert decoding_rate(list(zip(tokens, seconds, running, strict=True))) == pytest.approx((0.003, 0.0002, 12))


def test_a_measured_distribution_is_drawn_from_again():
    values = np.random.default_rng(0).lognormal(3, 1.2, 5000)
    shape = quantiles(values)
    assert len(shape) == len(PROBABILITIES)
    rng = random.Random(0)
    again = [drawn(rng, shape) for _ in range(5000)]
    for quantile in (0.1, 0.5, 0.9, 0.99):
        assert np.quantile(again, quantile) == pytest.approx(np.quantile(values, quantile), rel=0.1)
    assert np.mean(again) == pytest.approx(np.mean(values), rel=0.1)
    assert max(bounded(rng, shape, 100) for _ in range(1000)) == 100


@pytest.mark.parametrize(("lines", "calls", "count"), [
    ([answer(0, 1), answer(1, 2)], 2, 0),
    ([answer(0, 1), answer(1, 2, status=503)], 1, 1),
    ([answer(0, 1)], 1, 1),  # a request without an answer
    ([answer(0, 1), answer(1, 2)], 1, 1),  # an answer twice for one call
])
def test_errors_and_repeated_requests_are_counted(lines, calls, count):
    end = {"what": "rollout", "rollout": "g0-r0", "began": 0, "ended": 3, "requests": 2}
    assert errors(seen(*lines, end, calls={"g0-r0": calls})) == count
