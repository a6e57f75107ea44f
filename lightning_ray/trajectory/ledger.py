"""The account of sampled tokens (law 1): every one is trained, or dropped under a named reason."""

from collections import Counter
from dataclasses import dataclass, field


class LedgerError(AssertionError):
    """Tokens are unaccounted for: a fault in this library, never a matter of data."""


@dataclass(slots=True)
class Ledger:
    """`sampled == trained + sum(dropped.values())`, per rollout, and per step when ledgers are added up."""

    sampled: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def drop(self, reason: str, tokens: int) -> None:
        if tokens:
            self.dropped[reason] += tokens

    def __add__(self, other: "Ledger") -> "Ledger":
        return Ledger(self.sampled + other.sampled, self.trained + other.trained, self.dropped + other.dropped)

    def check(self, where: str) -> None:
        """Raises `LedgerError` unless the account balances."""
        if self.sampled != self.trained + self.dropped.total():
            raise LedgerError(
                f"{where}: {self.sampled} tokens sampled, {self.trained} trained, {dict(self.dropped)} dropped: "
                f"{self.sampled - self.trained - self.dropped.total()} unaccounted for"
            )
