"""Bad input: each message names the field, the value and the remedy."""

import pytest
import yaml

from lightning_ray.config import Config, ConfigError


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
