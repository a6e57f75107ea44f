"""Messages that are read once, though a harness sends its whole history with every request, and tools as well.

A `Message` is plain data (`plain.py`) that keeps what is worked out of it: its digest, and what the chat template is
given of it. `Recent` finds the messages of a new request again that stand where they stood in one of the rollout's
latest requests, by comparing them as they were sent. What is left to do for each old message is that comparison.
"""

from collections.abc import Callable, Sequence
from typing import Any

CONVERSATIONS = 4
"""So many conversations of a rollout are remembered; sub-agents and title requests go on beside the main one."""


class Message(dict[str, Any]):
    """One message in plain form. Nobody changes it once it is made. Pickled, it is a plain dictionary."""

    __slots__ = ("digest", "entries", "link", "restored", "source")

    def __init__(self, fields: dict[str, Any], source: Any = None) -> None:
        super().__init__(fields)
        self.source = source
        """The message as it was sent, where the same again means the same."""
        self.digest: bytes | None = None
        """What tells it from other messages (`conversation.py`)."""
        self.link: tuple[bytes, bytes] | None = None
        """Digest of a conversation, and of that conversation with this message appended."""
        self.entries: tuple[str, list[Any]] | None = None
        """What the template is given of it, for a content format of vLLM's (`codec.py`)."""
        self.restored: Message | None = None
        """The message with the tool-call arguments that the policy sampled (`continuation.py`)."""

    def __reduce__(self) -> tuple:
        return dict, (dict(self),)


class Recent:
    """The conversations of a rollout's latest requests."""

    def __init__(self) -> None:
        self.conversations: list[list[Message]] = []
        self.request: tuple[bytes, Any] | None = None
        """The latest request without its messages: as it was sent, and as it was read."""

    def read(self, messages: Sequence[Any], make: Callable[[Any, int], Message]) -> list[Message]:
        """The messages of a request, those that are not known made by `make(message, number)`."""
        known: list[Message] = []
        for conversation in self.conversations:
            shared = _shared(conversation, messages)
            if shared > len(known):
                known = conversation[:shared]
        result = [*known, *(make(messages[number], number) for number in range(len(known), len(messages)))]
        others = [one for one in self.conversations if len(one) > len(known) or one[-1] is not known[-1]]
        self.conversations = [result, *others][:CONVERSATIONS]
        return result


def _shared(conversation: list[Message], messages: Sequence[Any]) -> int:
    """How many messages of the beginning are the same."""
    for number, (known, message) in enumerate(zip(conversation, messages, strict=False)):
        if known.source is None or known.source != message:
            return number
    return min(len(conversation), len(messages))
