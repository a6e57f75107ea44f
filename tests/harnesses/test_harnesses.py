"""`make test-slow`: each harness is installed in a place of its own, unchanged, and run as a command harness in
the sandbox, through the real proxy, until a small bug is fixed and graded. A harness that this machine cannot install
is skipped, with the reason.
"""

from collections import Counter

import pytest

from lightning_ray.config import Config
from lightning_ray.harness.checks import check_harness
from lightning_ray.harness.report import Ending, report
from lightning_ray.harness.rollouts import Rollouts
from lightning_ray.harness.spec import RolloutSpec
from lightning_ray.sandbox import backend
from lightning_ray.tasks.base import Task
from lightning_ray.tasks.workspaces import Workspaces
from tests.harnesses.install import Unavailable, install
from tests.harnesses.policy import Script
from tests.harnesses.table import ENTRIES
from tests.unit.proxy_parts import InProcess, codec_of, proxy_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

CONTEXT = 131_072
"""Of tokens that are shorter than a real vocabulary's: a system prompt of 20,000 tokens is 50,000 here."""
TASK = Task(
    instance_id="sums", files={"sums.py": "def add(a, b):\n    return a - b\n"},
    problem_statement="add in sums.py returns the difference of its arguments. Make it return their sum.",
    FAIL_TO_PASS=["adds"], PASS_TO_PASS=["zero"], grading={"module": "sums.py", "cases": {
        "adds": {"call": "add", "args": [2, 3], "expected": 5},
        "zero": {"call": "add", "args": [2, 0], "expected": 2}}})


@pytest.mark.parametrize("name", ENTRIES)
async def test_a_harness_mends_a_bug(name, tmp_path, row):
    entry = ENTRIES[name]
    try:
        place = install(name.lower().replace(" ", "-"), entry.install)
    except Unavailable as error:
        row(name, entry.install.version, entry.dialect, "", f"not run: {error}", "", "")
        pytest.skip(str(error))
    config = Config(
        harness={"kind": "command", "command": [part.replace("{bin}", str(place.bin)) for part in entry.command],
                 "env": entry.env, "files": entry.files, "result": entry.result,
                 "mounts": {str(path): str(path) for path in place.mounts},
                 "timeout_s": 600},
        sandbox={"memory_mb": 4096, "processes": 512, "cpus": 2, "disk_mb": 1024},
        sampling={"max_tokens": 2000}, runners={"infra_retries": 0}, reward={"timeout_s": 120},
    )
    check_harness(config.harness)
    codec = codec_of("hermes", CONTEXT)
    script = Script(codec, entry)
    server, _ = proxy_of(codec, script)
    await server.start()
    chosen = backend.choose(config.sandbox)
    rollouts = Rollouts(config, InProcess(server), Workspaces(tmp_path), chosen.make, None, chosen.report)
    try:
        record = await rollouts.run(RolloutSpec("r0", "g0", TASK, "train", seed=0, temperature=1.0))
    finally:
        await rollouts.stop()
        await server.stop()
    found = report(record.calls, Ending(record.end, record.reason), max_context=CONTEXT)
    why = Counter(branch.relation for branch in found.branches)
    row(name, entry.install.version, ", ".join(found.dialects), found.calls,
        f"{len(found.branches)}: " + ", ".join(f"{count} {relation}" for relation, count in why.items()),
        f"{found.sampled} / {found.trainable}", found.prompt_tokens)
    story = (record.reason, record.notes, [prompt[:3000] for prompt in script.prompts])
    assert (record.end, record.passed) == ("graded", True), story
    assert "+    return a + b" in record.patch
    assert list(found.dialects) == [entry.dialect]
    assert found.sampled == found.trainable + sum(found.masked.values())
    main = max(found.branches, key=lambda branch: len(branch.calls))
    assert len(main.calls) >= len(entry.turns), found.relations
