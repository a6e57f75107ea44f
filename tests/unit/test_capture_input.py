"""Bad input of `lightning-ray capture`: status 2, and a message with field, value and remedy. Nothing is started."""

import json

import pytest

from lightning_ray.cli import BAD_INPUT, main
from lightning_ray.config import Config
from lightning_ray.harness.capture import LONGEST_CONTEXT, TIMEOUT_S, mount, settings, with_defaults
from lightning_ray.policy.directory import check_context


@pytest.fixture
def model(tmp_path):
    """As far as the checks of input look."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (place / "model.safetensors").write_bytes(b"")
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return place


@pytest.mark.parametrize(("words", "said"), [
    (["--", "true"], ["no model", "--model DIR"]),
    (["--model", "/none", "--", "true"], ["policy.path", "no directory /none", "hub"]),
    (["--model", "MODEL"], ["no command", "after --"]),
    (["--model", "MODEL", "--", "no-such-program"], ["harness.command", "'no-such-program'", "Mount"]),
    (["--model", "MODEL", "--no-sandbox", "--", "no-such-program"], ["harness.command", "'no-such-program'", "PATH"]),
    (["--model", "MODEL", "--mount", "/none", "--", "true"], ["--mount", "'/none'", "HOST[:INSIDE]"]),
    (["--model", "MODEL", "--no-sandbox", "--mount", "/usr", "--", "true"], ["harness.mounts", "/usr", "Leave it out"]),
    (["--model", "MODEL", "--task", "/none.jsonl", "--", "true"], ["'/none.jsonl'", "JSONL"]),
    (["--model", "MODEL", "--policy.contexxt", "9", "--", "true"], ["policy.contexxt", "9"]),
    (["--model", "MODEL", "--policy.max_context", "9999", "--", "true"], ["policy.max_context", "9999", "4096"]),
    (["--model", "MODEL", "--quiet", "--", "true"], ["'--quiet'", "--part.field value"]),
    (["--model", "MODEL", "--generator.tensor_parallel", "2", "--", "true"], ["generator.tensor_parallel", "2"]),
])
def test_bad_input_is_explained(model, capsys, words, said):
    assert main(["capture", *[str(model) if word == "MODEL" else word for word in words]]) == BAD_INPUT
    message = capsys.readouterr().err
    for word in said:
        assert word in message


def test_files_of_a_model_that_cannot_be_read_are_named(model, capsys):
    for name, content in (("tokenizer_config.json", "{"), ("config.json", "[]")):
        (model / name).write_text(content)
        assert main(["capture", "--model", str(model), "--", "true"]) == BAD_INPUT
        said = capsys.readouterr().err
        assert "policy.path" in said and name in said and "Save the model again" in said


def test_what_an_engine_makes_of_scaled_positions_is_left_to_it():
    check_context(8192, {"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}})


def test_what_comes_after_the_dashes_is_the_harness_s_alone(model):
    what = settings(model=model, command=["echo", "--json", "{task}"], sandboxed=False)
    assert what.config.harness.command == ["echo", "--json", "{task}"]
    assert what.config.harness.kind == "command"
    assert what.backend is None and what.task.files


def test_the_model_s_own_context_is_the_default_and_settings_win():
    assert with_defaults(Config(), {"max_position_embeddings": 4096}).policy.max_context == 4096
    assert with_defaults(Config(), {"text_config": {"max_position_embeddings": 10**6}}
                         ).policy.max_context == LONGEST_CONTEXT
    given = Config.build({"policy": {"warm_start": {}, "max_context": 128}, "harness": {"timeout_s": 5}})
    assert with_defaults(given, {"max_position_embeddings": 4096}).policy.max_context == 128
    assert with_defaults(given, {}).harness.timeout_s == 5
    assert with_defaults(Config(), {}).harness.timeout_s == TIMEOUT_S


def test_a_mount_is_shown_at_its_own_path_unless_another_is_given(tmp_path):
    assert mount(str(tmp_path)) == (str(tmp_path), str(tmp_path))
    assert mount(f"{tmp_path}:/opt/x") == (str(tmp_path), "/opt/x")
