"""Bad input: each message names the field, the value and the remedy."""

import socket

import pytest
import yaml

from lightning_ray.config import Config, ConfigError
from lightning_ray.ray_session import check_address


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return path
    return write


@pytest.mark.parametrize(("text", "overrides", "words"), [
    ("learner: {lrr: 2}", (), ["learner.lrr", "2", "Did you mean 'lr'"]),
    ("learner: {lr: -3}", (), ["learner.lr", "-3", "--learner.lr VALUE"]),
    ("learner: {ranks: two}", (), ["learner.ranks", "'two'"]),
    ("algorithm: {advantage: gae}", (), ["algorithm.advantage", "'gae'", "'grpo'"]),
    ("nonsense: 1", (), ["nonsense", "Known here", "schedule"]),
    ("schedule: {groups_per_step: 8, groups_in_flight: 4}", (), ["schedule.groups_in_flight (4)", "at least"]),
    ("policy: {path: /x, warm_start: {}}", (), ["policy", "exactly one"]),
    ("learner: {offload_params: true}", (), ["learner.offload_params", "zero_stage 3"]),
    ("learner: {lora: {rank: 0}}", (), ["learner.lora.rank", "0"]),
    ("learner: {lora: {dropout: 1}}", (), ["learner.lora.dropout", "1"]),
    ("learner: {lora: {target_modules: []}}", (), ["learner.lora", "target_modules is []", "all-linear"]),
    ("learner: {lora: {target_modules: qproj}}", (), ["learner.lora.target_modules", "'qproj'", "all-linear"]),
    ("learner: {ranks: 3, sequence_parallel: 2}", (), ["sequence_parallel (2)", "learner.ranks (3)"]),
    ("algorithm: {mis_cap: 3}", (), ["algorithm.tis_cap", "algorithm.mis_cap", "null"]),
    ("- a list", (), ["must be a mapping"]),
    ("run: [", (), ["not valid YAML"]),
    ("", ("--run.steps", "many"), ["run.steps", "'many'"]),
    ("", ("--run.stepps", "5"), ["run.stepps", "Did you mean 'steps'"]),
    ("", ("--run.steps",), ["--run.steps has no value"]),
    ("", ("steps=5",), ["'steps=5'", "--part.field value"]),
    ("capture: {train: '(a'}", (), ["capture.train", "'(a'", "regular expression", "main"]),
    ("capture: {train: ''}", (), ["capture.train", "''", "all"]),
    ("run: {name: 'a/b'}", (), ["run.name", "'a/b'"]),
    ("policy: {warm_start: {heads: 3}}", (), ["policy.warm_start.hidden_size (128)", "heads (3)", "42.6667", "32, 64"]),
    ("run: {seed: -1}", (), ["run.seed", "-1"]),
    ("ray: {object_store_gib: 0.05}", (), ["ray.object_store_gib", "0.05"]),
    ("run: {steps: 3}\nlearner: {}\nrun: {name: x}", (), ["'run' stands twice", "line 3"]),
])
def test_a_fault_is_explained(file, text, overrides, words):
    with pytest.raises(ConfigError) as error:
        Config.load(file(text), overrides)
    for word in words:
        assert word in str(error.value)


def test_all_faults_are_named_at_once(file):
    with pytest.raises(ConfigError) as error:
        Config.load(file("learner: {lr: -3, lrr: 2}\nfoo: 1"))
    assert str(error.value).count("\n") == 2


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        Config.load(tmp_path / "nowhere.yaml")


def test_overrides_win_and_reach_nested_fields(file):
    config = Config.load(file("run: {steps: 5}\nharness: {settings: {agent: {step_limit: 3}}}"), [
        "--run.steps=7", "--learner.betas", "[0.9, 0.95]", "--harness.settings.agent.cost_limit", "0",
        "--policy.warm_start.steps", "1", "--algorithm.tis-cap", "null"])
    assert config.run.steps == 7 and config.learner.betas == (0.9, 0.95) and config.algorithm.tis_cap is None
    assert config.harness.settings == {"agent": {"step_limit": 3, "cost_limit": 0}}


def test_what_is_text_on_a_command_line_is_text(file):
    def value(text):
        return Config.load(file(""), ["--sandbox.image", text]).sandbox.image
    assert [value(text) for text in ("2026", "2026-12-01", "on", "012", "12:30", "a: [b")] == [
        "2026", "2026-12-01", "on", "012", "12:30", "a: [b"]
    made = Config.load(file(""), ["--generator.extra", "{a: 1}", "--generator.extra.b", "1e-4", "--proxy.journal", "no",
                                  "--generator.extra.c", "true", "--generator.extra.d", "'5'", "--run.steps", "012"])
    assert made.generator.extra == {"a": 1, "b": 1e-4, "c": True, "d": "5"}
    assert made.proxy.journal is False and made.run.steps == 12


def test_an_environment_variable_of_a_harness_may_be_written_as_a_number(file):
    assert Config.load(file("harness: {env: {QUIET: 1}}")).harness.env == {"QUIET": "1"}


def test_a_fault_of_several_fields_is_named_once(file):
    for text, start in (("schedule: {groups_per_step: 8, groups_in_flight: 4}", "schedule.groups_in_flight (4)"),
                        ("generator: {in_flight: resend}\nlearner: {zero_stage: 0}", "generator.in_flight: resend")):
        with pytest.raises(ConfigError) as error:
            Config.load(file(text))
        assert str(error.value).startswith(start)


def test_a_model_on_the_command_line_takes_the_place_of_the_files_warm_start(file):
    path = file("policy: {warm_start: {steps: 3}}")
    policy = Config.load(path, ["--policy.path", "/model"]).policy
    assert str(policy.path) == "/model" and policy.warm_start is None
    with pytest.raises(ConfigError, match="exactly one"):
        Config.load(path, ["--policy.path", "/model", "--policy.warm_start.steps", "5"])


def test_the_environment_changes_nothing(file, monkeypatch):
    monkeypatch.setenv("RUN", '{"steps": 3}')
    monkeypatch.setenv("LEARNER__LR", "1")
    assert Config.load(file("")) == Config()


def test_the_resolved_config_is_the_same_config(file):
    config = Config.load(file("run: {steps: 5}"), ["--learner.lr", "3e-5"])
    assert Config.build(yaml.safe_load(config.to_yaml())) == config


def test_the_digest_ignores_where_the_run_lies_and_nothing_else(file):
    plain = Config()
    assert plain.digest() == Config.load(file(""), ["--run.dir", "/elsewhere", "--run.name", "other"]).digest()
    assert plain.digest() != Config.load(file(""), ["--learner.lr", "2e-6"]).digest()


def test_a_cluster_where_nobody_listens_is_named_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and not listening
        for scheme in ("", "ray://"):
            address = f"{scheme}127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(ConfigError, match=rf"ray\.address: '{address}' cannot be reached"):
                check_address(Config(ray={"address": address}))
    check_address(Config(ray={"address": "auto"}))
