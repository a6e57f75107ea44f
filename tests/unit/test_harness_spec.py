"""harness/spec.py: placeholders, command plans, and early checks that name field, value and remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_ray.config import ConfigError, HarnessConfig
from lightning_ray.harness.checks import check_harness
from lightning_ray.harness.spec import HarnessResult, command_plan, fill


def test_placeholders_are_filled_in_once():
    values = {"task": "print {model} and {base_url}", "model": "policy", "base_url": "http://x"}
    assert fill("{task} | {model} | {base_url} | {other} | {{}}", values) == (
        "print {model} and {base_url} | policy | http://x | {other} | {{}}")


def test_templates_of_the_harness_itself_are_left_alone():
    assert fill("Solve {{task}} with {{ model }}: {task}", {"task": "it", "model": "m"}) == (
        "Solve {{task}} with {{ model }}: it")


def test_command_plan_fills_command_environment_and_files():
    config = HarnessConfig(
        kind="command", command=["/usr/bin/agent", "--task={task}", "{base_url}/v1"],
        env={"MODEL": "openai/{model}", "OPENAI_API_KEY": "other"},
        files={"/tmp/config.json": '{"url": "{base_url}", "task": "{task}"}'})
    plan = command_plan(config, "fix $(it) 'now'", "tiny")
    assert plan.argv == ("/usr/bin/agent", "--task=fix $(it) 'now'", "http://127.0.0.1:8080/v1")
    assert plan.env["MODEL"] == "openai/tiny"
    assert plan.env["OPENAI_API_KEY"] == "other"
    assert plan.files == {"/tmp/config.json": '{"url": "http://127.0.0.1:8080", "task": "fix $(it) \'now\'"}'}


def test_command_plan_points_both_vendors_sdks_at_the_endpoint():
    env = command_plan(HarnessConfig(kind="command", command=["x"]), "t", "m").env
    assert env["OPENAI_BASE_URL"] == env["OPENAI_API_BASE"] == "http://127.0.0.1:8080/v1"
    assert env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8080"
    assert env.keys() == {"OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL",
                          "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"}


def test_the_default_harness_is_found_without_being_imported():
    code = ("import sys; from lightning_ray.config import HarnessConfig; "
            "from lightning_ray.harness.checks import check_harness; check_harness(HarnessConfig()); "
            "sys.exit(any(name in sys.modules for name in ('litellm', 'minisweagent', 'ray', 'vllm')))")
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


@pytest.mark.parametrize(("entry", "message"), [
    ("lightning_ray.harness.mini_swe_agent", "module:function"),
    ("no such:thing", "module:function"),
    ("lightning_ray.harness.nothing:run", "no module 'lightning_ray.harness.nothing'"),
    ("no_such_package.harness:run", "no module 'no_such_package.harness'"),
    ("lightning_ray.harness.mini_swe_agent:walk", "defines no 'walk'"),
])
def test_bad_python_entries_are_named(entry, message):
    with pytest.raises(ConfigError) as raised:
        check_harness(HarnessConfig(entry=entry))
    assert "harness.entry" in str(raised.value) and message in str(raised.value) and entry in str(raised.value)


def test_an_entry_may_be_imported_into_its_module(tmp_path, monkeypatch):
    (tmp_path / "imported_entry.py").write_text("from os.path import join as run\nwalk = run\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    check_harness(HarnessConfig(entry="imported_entry:run"))
    check_harness(HarnessConfig(entry="imported_entry:walk"))


def command(program: str, **more) -> HarnessConfig:
    return HarnessConfig(kind="command", command=[program, "{task}"], **more)


def test_programs_that_the_sandbox_shows_pass():
    check_harness(command("bash"))
    check_harness(command("/usr/bin/env"))
    check_harness(command("/testbed/agent"))


@pytest.mark.parametrize("program", ["no-such-agent", "/usr/bin/no-such-agent", "/opt/agent/bin/no-such-agent"])
def test_a_command_that_does_not_exist_is_named_with_the_remedy(program):
    with pytest.raises(ConfigError) as raised:
        check_harness(command(program))
    message = str(raised.value)
    assert "harness.command" in message and repr(program) in message and "harness.mounts" in message


def test_no_command_at_all():
    with pytest.raises(ConfigError, match=r"harness\.command is empty"):
        check_harness(HarnessConfig(kind="command"))


def installation(tmp_path: Path, first_line: str) -> Path:
    program = tmp_path / "bin" / "agent"
    program.parent.mkdir()
    program.write_text(f"{first_line}\n")
    program.chmod(0o755)
    return program


def test_a_mounted_program_is_found_at_its_path_inside(tmp_path):
    program = installation(tmp_path, "#!/usr/bin/env python3")
    check_harness(command("/opt/agent/bin/agent", mounts={str(tmp_path): "/opt/agent"}))
    check_harness(command("agent", mounts={str(tmp_path): "/opt/agent"}, env={"PATH": "/opt/agent/bin:/usr/bin"}))
    program.chmod(0o644)
    if os.geteuid() != 0 or not os.access(program, os.X_OK):
        with pytest.raises(ConfigError, match="not executable"):
            check_harness(command("/opt/agent/bin/agent", mounts={str(tmp_path): "/opt/agent"}))


def test_a_program_outside_the_mounts_is_not_found(tmp_path):
    program = installation(tmp_path, "#!/bin/sh")
    with pytest.raises(ConfigError, match="does not exist in the sandbox"):
        check_harness(command(str(program)))


def test_an_interpreter_that_the_sandbox_does_not_show_is_named(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "python3").symlink_to(sys.executable)
    program = installation(tmp_path, f"#!{tmp_path}/bin/python3")
    (tmp_path / "bin" / "python3").symlink_to(base / "python3")
    with pytest.raises(ConfigError) as raised:
        check_harness(command(str(program), mounts={str(tmp_path / "bin"): str(tmp_path / "bin")}))
    assert f"'{tmp_path}/bin/python3'" in str(raised.value)
    assert str(Path(sys.executable).resolve()) in str(raised.value)


def test_links_that_lead_in_a_circle_do_not_exist(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="does not exist"):
        check_harness(command(str(tmp_path / "a"), mounts={str(tmp_path): str(tmp_path)}))


@pytest.mark.parametrize(("more", "field"), [
    ({"mounts": {"/no/such/directory": "/opt/x"}}, "harness.mounts"),
    ({"mounts": {"/usr": "opt/x"}}, "harness.mounts"),
    ({"mounts": {"/usr": "/opt/../etc"}}, "harness.mounts"),
    ({"files": {"config.yaml": "x"}}, "harness.files"),
])
def test_bad_mounts_and_files_are_named(more, field):
    with pytest.raises(ConfigError, match=field):
        check_harness(command("bash", **more))


def test_results_of_python_harnesses_are_checked():
    assert HarnessResult.from_dict({"exit_status": "Submitted", "ok": 1}) == HarnessResult("Submitted", ok=True)
    with pytest.raises(ValueError, match="lacks exit_status, ok"):
        HarnessResult.from_dict({})
    with pytest.raises(ValueError, match="not NoneType"):
        HarnessResult.from_dict(None)
