"""harness/command.py: the exit status of a command harness from its own result file."""

import pytest

from lightning_ray.config import HarnessResultFile
from lightning_ray.harness.command import parse_result
from lightning_ray.harness.spec import HarnessResult

FILE = HarnessResultFile(path="/tmp/result.json", key="info.exit_status", ok=["Submitted"])


def test_the_key_leads_into_objects():
    submitted, exceeded = b'{"info": {"exit_status": "Submitted"}}', b'{"info": {"exit_status": "LimitsExceeded"}}'
    assert parse_result(FILE, submitted, "log") == HarnessResult("Submitted", True, "", "log")
    assert parse_result(FILE, exceeded, "") == HarnessResult("LimitsExceeded", False)


def test_values_are_compared_as_text():
    file = HarnessResultFile(path="/tmp/r.json", key="code", ok=["0", "True"])
    assert parse_result(file, b'{"code": 0}', "").ok
    assert parse_result(file, b'{"code": true}', "").ok
    assert not parse_result(file, b'{"code": 1}', "").ok


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"info": 1}', b'{"info": {}}', b"\xff"])
def test_a_file_without_it_is_a_failure_of_the_harness_not_an_error(content):
    result = parse_result(FILE, content, "")
    assert not result.ok and "/tmp/result.json" in result.detail
