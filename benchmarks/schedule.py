"""Three schedules of the same work: synchronous, asynchronous that drains before updates, asynchronous that goes on.

    python benchmarks/schedule.py --real --json FILE         # tiny policy, real parts, 8 minutes; then simulated
    python benchmarks/schedule.py --real --answers short     # the quickstart's own policy: short answers
    python benchmarks/schedule.py --calibrated FILE          # larger machines, simulated with what such a run measured
    python benchmarks/schedule.py                            # simulated with assumed constants (a 9 B policy)

**Real** (`schedules/real.py`): vLLM, DeepSpeed, proxy, bubblewrap and unchanged mini-SWE-agent on the quickstart's
tasks, whose commands sleep in the sandbox for a log-normal time with p99 / p50 = 15 (`schedules/harness.py`); the
policy's answers have such a tail too (`schedules/policy.py`). Every schedule makes as many updates of as many groups on
the same tasks; the asynchronous ones have four times as many groups in flight. Nothing but the schedule differs.

**Simulated** (`schedules/simulation.py`): a discrete-event simulation on the trainer's own buffer and task stream.
`schedules/calibration.py` says what its constants are taken from; whether it then gives the wall times of the real runs
is printed first. A row `GxR/N` is one machine: G GPUs, R rollouts in flight in the asynchronous schedules, R / N
rollouts trained in each update. The synchronous schedule has those R / N in flight.

Columns: seconds of the steps; tokens/s of the groups that were trained, its ratio to the synchronous schedule's and to
`drain`'s; `idle`, the share of time in which the devices neither sample nor learn; `thin`, the mean number of sequences
on a device while it samples; `stale`, the share of finished groups that were dropped as too old; `age`, the mean number
of policy versions between the oldest token and the update; `errors`, requests of a harness that got an error or no
answer, or were made again.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.schedules.calibration import constants, figures
from benchmarks.schedules.simulation import GROUP_SIZE, SCHEDULES, TIMES_IN_FLIGHT, Simulation, Work

ROWS = "8x64/2,8x64/4,8x256/2,8x256/4,32x1024/4,128x4096/4,512x16384/4"
SEEDS = 5
"""Simulations of the real run whose mean is compared with it."""


def row_of(text: str) -> tuple[int, int, int]:
    """`8x64/2` -> GPUs, groups trained in each update, groups in flight."""
    gpus, rest = text.split("x")
    rollouts, part = map(int, rest.split("/"))
    return int(gpus), rollouts // part // GROUP_SIZE, rollouts // GROUP_SIZE


class Table:
    """Prints results as they come, and keeps them."""

    def __init__(self) -> None:
        self.results: list[dict] = []
        self._rates: dict[str, dict[str, float]] = {}
        print(f"{'row':>14}  {'schedule':12} {'wall s':>7} {'tokens/s':>9} {'ratio':>6} {'/drain':>6} {'idle':>5} "
              f"{'thin':>6} {'stale':>6} {'age':>5}")

    def add(self, row: str, schedule: str, result: dict) -> None:
        rates = self._rates.setdefault(row, {})
        rates[schedule] = rate = result["tokens_per_s"]
        result |= {"ratio": rate / rates["synchronous"],
                   "to_drain": rate / rates["drain"] if "drain" in rates else None}
        self.results.append({"row": row, "schedule": schedule, **result})
        to_drain = " " * 6 if result["to_drain"] is None else f"{result['to_drain']:6.2f}"
        print(f"{row:>14}  {schedule:12} {result['wall_s']:7.1f} {result['tokens_per_s']:9.0f} {result['ratio']:6.2f} "
              f"{to_drain} {result['idle']:5.2f} {result['sequences']:6.1f} {result['stale']:6.2f} "
              f"{result['age']:5.1f}", flush=True)


def simulated(rows: str, steps: int, work: Work) -> list[dict]:
    table = Table()
    for row in rows.split(","):
        for schedule in SCHEDULES:
            table.add(row, schedule, Simulation(schedule, *row_of(row), steps, work).run())
    return table.results


def really(answers: str, scale: dict) -> list[dict]:
    """Runs the three schedules one after the other. Returns all that was seen of each."""
    from benchmarks.schedules import policy, real
    from lightning_ray.config import Config
    from lightning_ray.policy import warm_start

    quickstart = Config.load(real.ROOT / "jobs/quickstart.yaml")
    make = policy.make if answers == "long" else warm_start.make_policy
    model = make(quickstart.policy.warm_start, quickstart.harness.settings, None)
    seen = []
    for schedule in SCHEDULES:
        with tempfile.TemporaryDirectory(prefix="schedule-") as root:
            seen.append(real.run(schedule, real.Scale(long_answers=answers == "long", **scale), model, Path(root)))
    return seen


def compared(seen: list[dict], steps: int, work: Work) -> tuple[list[dict], list[dict]]:
    """Prints what was measured, and what the simulation makes of the same machine and work."""
    measured = Table()
    for each in seen:
        measured.add("real", each["schedule"], figures(each))
    for each in measured.results:
        low, high = each["heldout_ci95"]
        print(f"{each['schedule']:>28}: held-out rate {each['heldout']:.2f} ({low:.2f}-{high:.2f}) after {steps} "
              f"updates of {each['groups_trained'] // steps} groups; {each['tokens_trained']} tokens trained; errors: "
              f"{each['errors']}")
    groups = seen[0]["metrics"][0]["groups_trained"]
    predicted = Table()
    for each in measured.results:
        runs = [Simulation(each["schedule"], 1, groups, TIMES_IN_FLIGHT * groups, steps, work, seed).run()
                for seed in range(SEEDS)]
        predicted.add("predicted", each["schedule"], {name: fmean(run[name] for run in runs) for name in runs[0]})
        print(f"{'predicted / real wall time':>40}: {predicted.results[-1]['wall_s'] / each['wall_s']:.2f}")
    return measured.results, predicted.results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--real", action="store_true", help="run the schedules for real, and calibrate by that")
    parser.add_argument("--answers", choices=("long", "short"), default="long", help="with --real: whose answers")
    parser.add_argument("--scale", type=json.loads, default={}, metavar="JSON", help="with --real: fields of `Scale`")
    parser.add_argument("--calibrated", type=Path, metavar="FILE", help="simulate what this file of --real measured")
    parser.add_argument("--rows", default=ROWS, help=f"GPUSxROLLOUTS/PARTS, with commas (default {ROWS})")
    parser.add_argument("--steps", type=int, default=12, help="simulated updates (default 12)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    options = parser.parse_args()
    results: dict = {}
    work = Work()
    if options.real:
        results["seen"] = really(options.answers, options.scale)
    elif options.calibrated:
        results["seen"] = json.loads(options.calibrated.read_text())["seen"]
    if options.json and options.real:
        options.json.write_text(json.dumps(results))
    if results:
        work = constants(results["seen"])
        results["real"], results["predicted"] = compared(results["seen"], len(results["seen"][0]["metrics"]), work)
        print(json.dumps({name: value for name, value in asdict(work).items()}))
    results["simulated"] = simulated(options.rows, options.steps, work)
    if options.json:
        options.json.write_text(json.dumps({**results, "work": asdict(work)}))


if __name__ == "__main__":
    main()
