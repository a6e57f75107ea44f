"""Generated tasks: real bugs with real solutions, tests that only the right operator passes, splits without overlap."""

import subprocess
from itertools import islice

import pytest

from lightning_ray.config import TasksConfig
from lightning_ray.tasks.one_line_bugs import OPERATORS, WORDS, Instance, generate, instances


def some(count: int, heldout: bool = False) -> list[Instance]:
    return list(islice(instances("test", heldout=heldout), count))


def passed(source: str, grading: dict) -> set[str]:
    """The cases that a module passes, by running it."""
    namespace: dict = {}
    exec(source, namespace)
    return {
        case_id
        for case_id, case in grading["cases"].items()
        if namespace[case["call"]](*case["args"]) == case["expected"]
    }


def test_only_the_right_operator_passes_all_cases():
    for instance in some(300):
        grading = instance.task().grading
        passing = [s for s in OPERATORS if passed(instance.with_operator(s), grading) == set(grading["cases"])]
        assert passing == [WORDS[instance.word]]


def test_fail_to_pass_and_pass_to_pass_are_what_the_bug_breaks_and_leaves():
    for instance in some(300):
        task = instance.task()
        assert task.FAIL_TO_PASS and task.PASS_TO_PASS
        assert passed(task.files[instance.path], task.grading) == set(task.PASS_TO_PASS)
        assert set(task.FAIL_TO_PASS) | set(task.PASS_TO_PASS) == set(task.grading["cases"])
        assert not set(task.FAIL_TO_PASS) & set(task.PASS_TO_PASS)


def test_the_reverse_of_the_patch_is_the_solution_for_git(tmp_path):
    for number, instance in enumerate(some(12)):
        task, folder = instance.task(), tmp_path / str(number)
        folder.mkdir()
        for path, content in task.files.items():
            (folder / path).write_text(content)
        git = ["git", "apply", "--verbose", "-"]
        subprocess.run([*git, "--reverse"], cwd=folder, input=task.patch, text=True, check=True, capture_output=True)
        assert (folder / instance.path).read_text() == instance.solved()
        subprocess.run(git, cwd=folder, input=task.patch, text=True, check=True, capture_output=True)
        assert (folder / instance.path).read_text() == task.files[instance.path]


def test_statements_say_the_word_and_never_an_operator():
    for instance in some(300):
        statement = instance.problem_statement()
        assert instance.word in statement and instance.path in statement and instance.function.name in statement
        assert not any(f" {symbol} " in statement for symbol in OPERATORS)
        assert not any(symbol in statement for symbol in ("*", "//", "%", "+"))


@pytest.mark.parametrize("seed", [0, 1])
def test_thousands_of_distinct_tasks_and_no_overlap(seed):
    splits = generate(TasksConfig(train=3000, heldout=400, seed=seed))
    train = {(*task.files.values(), task.problem_statement) for task in splits.train}
    heldout = {(*task.files.values(), task.problem_statement) for task in splits.heldout}
    assert len(train) == 3000 and len(heldout) == 400
    assert not train & heldout
    ids = [task.instance_id for task in splits.train + splits.heldout]
    assert len(set(ids)) == len(ids)


def test_no_training_seed_reaches_a_held_out_instance():
    heldout = {task.instance_id for task in generate(TasksConfig(train=1, heldout=300, seed=0)).heldout}
    for seed in range(1, 4):
        train = generate(TasksConfig(train=1000, heldout=0, seed=seed)).train
        assert not heldout & {task.instance_id for task in train}


def test_every_word_and_every_bug_occurs_on_both_sides():
    for heldout in (False, True):
        seen = some(500, heldout)
        assert {instance.word for instance in seen} == set(WORDS)
        assert {instance.wrong_operator for instance in seen} == set(OPERATORS)


def test_the_same_seed_gives_the_same_tasks():
    config = TasksConfig(train=50, heldout=20, seed=7)
    assert generate(config) == generate(config)
    assert generate(config) != generate(config.model_copy(update={"seed": 8}))
