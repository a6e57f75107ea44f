"""One-line bugs in small Python modules, generated from a seed: a source of tasks that needs no download.

Each task is a module of two functions, one of which uses a wrong arithmetic operator. The statement says what the
function should return in a word ("the product of its arguments") and shows one wrong result; it never names an
operator. The tests call both functions, and the agent never sees them. Instances follow SWE-smith's schema (`patch`
is the bug, the solution is its reverse).

Training and held-out tasks share no instance, whatever their seeds: the solved module together with the word decides,
by a hash, on which side an instance falls. What they share are the words, which are what there is to learn.
Pure: the same `TasksConfig` gives the same tasks, in every process.
"""

import hashlib
import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_ray.config import TasksConfig
from lightning_ray.tasks.base import Task, TaskSplits
from lightning_ray.tasks.patches import git_patch

OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}

WORDS = {
    "sum": "+", "total": "+",
    "difference": "-", "gap": "-",
    "product": "*", "area": "*",
    "quotient": "//", "share": "//",
    "remainder": "%", "rest": "%",
}  # fmt: skip
"""What a statement says -> the operator that it asks for."""

MODULES = ("shop", "bank", "farm", "game", "trip", "team", "park", "mill")
FUNCTIONS = ("bill", "score", "level", "value", "stock", "speed", "power", "order", "count", "price", "grade", "reach")
PARAMETERS = ("apples", "pears", "coins", "cards", "boxes", "miles", "hours", "seats", "lines", "steps", "pages",
              "trees", "birds", "ships", "rooms", "goals")  # fmt: skip

STATEMENTS = (
    "{function} in {module} should return the {word} of its arguments, but {example} gives {wrong}.",
    "In {module}, {example} gives {wrong}. The {word} of the arguments is what {function} should return.",
    "{example} gives {wrong}: in {module}, {function} should return the {word} of its arguments.",
)

CASES = 3
"""Tests of the function with the bug, and of the other one."""
HELDOUT_SHARE = 8
"""One instance in so many falls on the held-out side."""


@dataclass(frozen=True)
class Function:
    """One function of two parameters that combines them by one operator."""

    name: str
    parameters: tuple[str, str]
    operator: str

    def source(self) -> str:
        first, second = self.parameters
        return f"def {self.name}({first}, {second}):\n    return {first} {self.operator} {second}\n"


@dataclass(frozen=True)
class Instance:
    """A solved module, the function in it that gets the bug, the word of the statement, and the bug."""

    module: str
    functions: tuple[Function, Function]
    broken: int
    word: str
    wrong_operator: str
    example: tuple[int, int]
    statement: str

    @property
    def function(self) -> Function:
        return self.functions[self.broken]

    @property
    def path(self) -> str:
        return f"{self.module}.py"

    @property
    def key(self) -> str:
        """What makes an instance: the solved module and the word."""
        return hashlib.sha256(f"{self.path}\n{self.solved()}{self.broken} {self.word}".encode()).hexdigest()

    @property
    def heldout(self) -> bool:
        return int(self.key[:8], 16) % HELDOUT_SHARE == 0

    def solved(self) -> str:
        return "\n\n".join(function.source() for function in self.functions)

    def with_operator(self, symbol: str) -> str:
        """The module with `symbol` in the place of the bug."""
        functions = list(self.functions)
        functions[self.broken] = replace(self.function, operator=symbol)
        return "\n\n".join(function.source() for function in functions)

    def problem_statement(self) -> str:
        a, b = self.example
        return self.statement.format(
            function=self.function.name,
            module=self.path,
            word=self.word,
            example=f"{self.function.name}({a}, {b})",
            wrong=OPERATORS[self.wrong_operator](a, b),
        )

    def cases(self) -> dict[str, dict]:
        """Test id -> call, arguments, expected result. Every case tells all operators apart."""
        cases = {}
        for function in self.functions:
            for number, (a, b) in enumerate(arguments_for(self.key + function.name), start=1):
                cases[f"test_{self.module}.py::test_{function.name}_{number}"] = {
                    "call": function.name,
                    "args": [a, b],
                    "expected": OPERATORS[function.operator](a, b),
                }
        return cases

    def task(self) -> Task:
        solved, broken = self.solved(), self.with_operator(self.wrong_operator)
        cases = self.cases()
        fails = [
            case_id
            for case_id, case in cases.items()
            if case["call"] == self.function.name
            and OPERATORS[self.wrong_operator](*case["args"]) != case["expected"]
        ]
        return Task(
            instance_id=f"one_line_bugs__{self.module}.{self.function.name}__{self.key[:12]}",
            repo=f"one_line_bugs/{self.module}",
            problem_statement=self.problem_statement(),
            patch=git_patch(self.path, solved, broken),
            FAIL_TO_PASS=fails,
            PASS_TO_PASS=[case_id for case_id in cases if case_id not in fails],
            files={self.path: broken},
            grader="cases",
            grading={"module": self.path, "cases": cases},
        )


def telling(a: int, b: int) -> bool:
    """Whether every operator gives another result for these arguments."""
    results = [function(a, b) for function in OPERATORS.values()]
    return len(set(results)) == len(results)


TELLING = tuple((a, b) for a in range(3, 30) for b in range(2, 10) if telling(a, b))


def arguments_for(seed: str) -> list[tuple[int, int]]:
    return random.Random(seed).sample(TELLING, CASES)


def instances(seed: str, *, heldout: bool) -> Iterator[Instance]:
    """Endless distinct instances of one side."""
    rng = random.Random(seed)
    seen = set()
    while True:
        word = rng.choice(list(WORDS))
        names = rng.sample(FUNCTIONS, 2)
        broken = rng.randrange(2)
        functions = [
            Function(name, tuple(rng.sample(PARAMETERS, 2)), rng.choice(list(OPERATORS))) for name in names
        ]
        functions[broken] = Function(names[broken], functions[broken].parameters, WORDS[word])
        instance = Instance(
            module=rng.choice(MODULES),
            functions=tuple(functions),
            broken=broken,
            word=word,
            wrong_operator=rng.choice([symbol for symbol in OPERATORS if symbol != WORDS[word]]),
            example=rng.choice(TELLING),
            statement=rng.choice(STATEMENTS),
        )
        if instance.heldout == heldout and instance.key not in seen:
            seen.add(instance.key)
            yield instance


def generate(config: TasksConfig) -> TaskSplits:
    """`config.train` training tasks and `config.heldout` held-out tasks."""
    train = instances(f"train {config.seed}", heldout=False)
    heldout = instances(f"heldout {config.seed}", heldout=True)
    return TaskSplits(
        train=[next(train).task() for _ in range(config.train)],
        heldout=[next(heldout).task() for _ in range(config.heldout)],
    )
