"""Turns: the device's time is shared evenly, however long the steps of each model take. Time is simulated."""

import itertools
from collections import Counter
from dataclasses import dataclass

from mlxserve.engine.turns import Turns


@dataclass(eq=False)
class Model:
    step: float
    spent: float = 0.0


def run(turns: Turns[Model], models: list[Model], seconds: float) -> list[Model]:
    """Whose steps are computed in that time."""
    order: list[Model] = []
    while seconds > 0:
        chosen = turns.next(models)
        turns.add(chosen, chosen.step)
        order.append(chosen)
        seconds -= chosen.step
    return order


def shares(order: list[Model]) -> Counter[Model]:
    """Seconds by model."""
    return Counter({model: model.step * count for model, count in Counter(order).items()})


def test_slow_steps_take_no_more_than_their_share() -> None:
    fast, slow = Model(0.01), Model(1.0)
    found = shares(run(Turns(), [fast, slow], 100.0))
    assert abs(found[fast] - found[slow]) <= 1.0


def test_nobody_waits_longer_than_the_others_steps_take() -> None:
    fast, slow, other = Model(0.01), Model(1.0), Model(0.3)
    order = run(Turns(), [fast, slow, other], 60.0)
    positions = [index for index, model in enumerate(order) if model is fast]
    waits = [sum(model.step for model in order[a + 1 : b]) for a, b in itertools.pairwise(positions)]
    assert max(waits) <= 1.3 + 1e-9


def test_alone_it_gets_everything() -> None:
    only = Model(0.5)
    assert run(Turns(), [only], 5.0) == [only] * 10


def test_time_without_work_is_no_credit() -> None:
    turns: Turns[Model] = Turns()
    busy, late = Model(0.1), Model(0.1)
    run(turns, [busy], 1000.0)
    order = run(turns, [busy, late], 10.0)
    found = shares(order)
    assert abs(found[busy] - found[late]) <= 0.2
    assert late in order[:2]


def test_who_comes_back_has_no_debt_that_the_others_did_not_pay() -> None:
    turns: Turns[Model] = Turns()
    first, second = Model(0.1), Model(0.1)
    run(turns, [first], 1000.0)
    run(turns, [second], 1.0)
    order = run(turns, [first, second], 10.0)
    assert abs(shares(order)[first] - shares(order)[second]) <= 0.2
