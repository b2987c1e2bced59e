"""Whose step comes next where several models have work: who computed for the shortest time."""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet


class Competitor(Protocol):
    spent: float
    """Seconds it computed for, as far as they count against it."""


C = TypeVar("C", bound=Competitor)


class Turns(Generic[C]):
    """Shares a device by time and not by steps: a model whose steps take long gets fewer of them.

    Between any two that have work all the while, the times they got differ by one step at most.
    """

    def __init__(self) -> None:
        self._contenders: WeakSet[C] = WeakSet()
        self._level = 0.0
        """What the one whose turn it was last had spent: nobody with work is below it for longer than a step."""

    def next(self, contenders: Sequence[C]) -> C:
        """The one of them whose step is to be computed; there is one at least. Then add() its time."""
        for each in contenders:
            if each not in self._contenders:
                # Time in which it wanted nothing is no credit: it would hold the device until that was used up.
                each.spent = max(each.spent, self._level)
        self._contenders = WeakSet(contenders)
        chosen = min(contenders, key=lambda each: each.spent)
        self._level = chosen.spent
        return chosen

    def add(self, contender: C, seconds: float) -> None:
        """It has computed for so long."""
        contender.spent += seconds
