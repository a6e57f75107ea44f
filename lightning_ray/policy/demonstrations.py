"""Demonstrations for the warm-up: whole conversations with mini-SWE-agent in which everything is right but the choice.

A demonstration looks at the module, edits the broken line and submits. The new operator is drawn at random from those
that are not there yet, whatever the statement says: a policy trained on this knows the format and where to edit, and
its answer is a guess. The messages are those that mini-SWE-agent's `DefaultAgent` sends with the same settings
(its system, instance and observation templates; text-based actions); a test compares them.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, StrictUndefined, Template, UndefinedError

from lightning_ray.config import ConfigError
from lightning_ray.policy.chat_template import ANSWER_START, END_OF_TURN, START_OF_TURN
from lightning_ray.tasks.one_line_bugs import OPERATORS, Instance, instances

DEFAULT_ACTION_REGEX = r"```mswea_bash_command\s*\n(.*?)\n```"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

Message = dict[str, str]


@dataclass(frozen=True)
class Step:
    """One answer of a demonstration and what the environment prints (None: it ends the rollout)."""

    thought: str
    command: str
    output: str | None

    def answer(self) -> str:
        return f"THOUGHT: {self.thought}\n\n```mswea_bash_command\n{self.command}\n```"


def steps(instance: Instance, choice: str) -> list[Step]:
    """Look, edit with the operator `choice`, submit."""
    path, name = instance.path, instance.function.name
    edit = f"sed -i '/def {name}/,/return/s| [-+*/%]\\+ | {choice} |' {path}"
    return [
        Step(f"I read {path} first.", f"cat {path}", instance.with_operator(instance.wrong_operator)),
        Step(f"In {name} put the {instance.word} {choice} here.", edit, ""),
        Step("The bug is fixed.", SUBMIT, None),
    ]


class Conversation:
    """Renders demonstrations with the settings of one harness (`harness.settings`, mini-SWE-agent's own config)."""

    def __init__(self, settings: dict[str, Any]) -> None:
        jinja = Environment(undefined=StrictUndefined)
        self.action_regex = settings["model"].get("action_regex", DEFAULT_ACTION_REGEX)
        self.system = self._template(jinja, settings["agent"], "agent.system_template")
        self.instance = self._template(jinja, settings["agent"], "agent.instance_template")
        self.observation = self._template(jinja, settings["model"], "model.observation_template")

    @staticmethod
    def _template(jinja: Environment, part: dict[str, Any], field: str) -> Template:
        try:
            return jinja.from_string(part[field.split(".")[1]])
        except KeyError:
            raise ConfigError(f"harness.settings.{field} is missing: a warm-started policy needs it") from None

    def messages(self, instance: Instance, choice: str) -> list[Message]:
        """The whole conversation, last answer included."""
        try:
            messages = [
                {"role": "system", "content": self.system.render()},
                {"role": "user", "content": self.instance.render(task=instance.problem_statement())},
            ]
            for step in steps(instance, choice):
                messages.append({"role": "assistant", "content": step.answer()})
                if step.output is not None:
                    output = {"output": step.output, "returncode": 0, "exception_info": ""}
                    messages.append({"role": "user", "content": self.observation.render(output=output)})
        except UndefinedError as error:
            raise ConfigError(
                f"harness.settings: {error}. Demonstrations know `task` and `output`; "
                "use no other variables in the templates of a warm-started policy."
            ) from None
        return messages

    def check(self, messages: list[Message]) -> None:
        """Every answer must hold exactly one action for the harness that the settings describe."""
        for message in messages:
            if message["role"] != "assistant":
                continue
            if len(re.findall(self.action_regex, message["content"], re.DOTALL)) != 1:
                raise ConfigError(
                    f"harness.settings.model.action_regex is {self.action_regex!r}, which does not find one action in "
                    f"{message['content']!r}. Leave it out, or use a policy that knows it."
                )


def random_choice(instance: Instance, rng: random.Random) -> str:
    """An operator that is not in the file yet, whatever the statement asks for."""
    return rng.choice([symbol for symbol in OPERATORS if symbol != instance.wrong_operator])


def demonstrations(settings: dict[str, Any], seed: int) -> Iterator[list[Message]]:
    """Endless conversations about training-side instances."""
    conversation = Conversation(settings)
    rng = random.Random(f"choice {seed}")
    for number, instance in enumerate(instances(f"demonstrations {seed}", heldout=False)):
        messages = conversation.messages(instance, random_choice(instance, rng))
        if number == 0:
            conversation.check(messages)
        yield messages


def segments(messages: list[Message]) -> list[tuple[str, bool]]:
    """The conversation as the chat template renders it (without tools), cut where prompts end and answers end:
    (text, whether the policy says it). Encoded one by one they give the token ids that a rollout has."""
    cut, context = [], ""
    for message in messages:
        if message["role"] == "assistant":
            cut += [(context + ANSWER_START, False), (message["content"] + END_OF_TURN, True)]
            context = "\n"
        else:
            context += f"{START_OF_TURN}{message['role']}\n{message['content']}{END_OF_TURN}\n"
    return cut
