"""Who may be in memory: room, order, eviction, keep-alive, pins."""

from pathlib import Path

import pytest

from mlxserve.engine.residency import Action, Load, Refuse, Residency, Resident, State, Unload
from mlxserve.errors import CapacityError, ModelLoadError
from mlxserve.store.model_source import LocalPath, ModelSource


def resident(name: str, size: int, *, keep_alive: float = 300.0, is_pinned: bool = False) -> Resident:
    return Resident(ModelSource(name, LocalPath(Path(name))), size, keep_alive, is_pinned)


def actions(residency: Residency, now: float = 0.0) -> list[Action]:
    found = []
    while (action := residency.next_action(now)) is not None:
        found.append(action)
    return found


def put(residency: Residency, each: Resident, now: float = 0.0) -> Resident:
    """Have a model in memory."""
    residency.want(each)
    assert actions(residency, now) == [Load(each)]
    residency.loaded(each, now)
    each.is_new = False
    return each


def test_models_that_fit_are_loaded_side_by_side() -> None:
    residency = Residency(100)
    first, second = put(residency, resident("a", 60)), put(residency, resident("b", 40))
    assert residency.used == 100
    assert residency.can_lease(first)
    assert residency.can_lease(second)


def test_the_least_recently_used_model_makes_room() -> None:
    residency = Residency(100)
    first, second, third = (put(residency, resident(name, 30), now) for now, name in enumerate("abc"))
    residency.lease(first, None)
    residency.release(first, 10.0)
    new = resident("d", 30)
    residency.want(new)
    assert actions(residency, 11.0) == [Unload(second, "evicted")]
    assert new.state is State.WAITING
    residency.gone(second)
    assert actions(residency, 11.0) == [Load(new)]
    assert {first.state, third.state} == {State.LOADED}


def test_no_more_than_needed_makes_room() -> None:
    residency = Residency(100)
    old, large = put(residency, resident("a", 20), 0.0), put(residency, resident("b", 70), 1.0)
    residency.want(resident("c", 30))
    assert actions(residency, 2.0) == [Unload(old, "evicted")]
    assert large.state is State.LOADED


def test_a_model_in_use_is_waited_for_and_nobody_else_gets_it() -> None:
    residency = Residency(100)
    busy = put(residency, resident("a", 80))
    residency.lease(busy, None)
    new = resident("b", 50)
    residency.want(new)
    assert actions(residency) == []
    assert not residency.can_lease(busy)
    residency.release(busy, 5.0)
    assert actions(residency, 5.0) == [Unload(busy, "evicted")]


def test_who_waited_for_a_load_is_served_although_others_need_the_room_by_then() -> None:
    residency = Residency(100)
    first, second = resident("a", 80), resident("b", 80)
    residency.want(first)
    residency.want(second)
    assert actions(residency) == [Load(first)]
    residency.loaded(first, 1.0)
    assert residency.can_lease(first)
    residency.lease(first, None)
    assert not residency.can_lease(first)
    residency.release(first, 2.0)
    assert actions(residency, 2.0) == [Unload(first, "evicted")]


def test_one_that_nobody_uses_goes_before_one_in_use() -> None:
    residency = Residency(100)
    busy, idle = put(residency, resident("a", 50), 0.0), put(residency, resident("b", 50), 1.0)
    residency.lease(busy, None)
    residency.want(resident("c", 50))
    assert actions(residency, 2.0) == [Unload(idle, "evicted")]
    assert residency.can_lease(busy)


def test_when_nobody_waits_any_more_the_chosen_one_stays() -> None:
    residency = Residency(100)
    busy, new = put(residency, resident("a", 80)), resident("b", 50)
    residency.lease(busy, None)
    residency.want(new)
    residency.withdraw(new)
    assert residency.can_lease(busy)
    residency.release(busy, 1.0)
    assert actions(residency, 1.0) == []


def test_first_come_first_served() -> None:
    residency = Residency(100)
    busy = put(residency, resident("a", 80))
    residency.lease(busy, None)
    large, small = resident("b", 90), resident("c", 10)
    residency.want(large)
    residency.want(small)
    assert actions(residency) == [], "a small one must not pass a large one for ever"
    residency.release(busy, 1.0)
    assert actions(residency, 1.0) == [Unload(busy, "evicted")]
    residency.gone(busy)
    assert actions(residency, 1.0) == [Load(large), Load(small)]


def test_a_number_of_models_is_a_limit_too() -> None:
    residency = Residency(100, max_models=1)
    first = put(residency, resident("a", 1))
    residency.want(resident("b", 1))
    assert actions(residency) == [Unload(first, "evicted")]


def test_what_never_fits_is_refused_with_the_numbers() -> None:
    residency = Residency(10_000_000_000)
    put(residency, resident("a", 1))
    large = resident("b", 12_340_000_000)
    residency.want(large)
    (refusal,) = actions(residency)
    assert isinstance(refusal, Refuse)
    assert isinstance(refusal.error, ModelLoadError)
    assert "b needs 12.34 GB" in str(refusal.error)
    assert "10.00 GB here" in str(refusal.error)
    assert residency.find(large.source.weights) is None


def test_pinned_models_stay_and_what_does_not_fit_beside_them_is_refused() -> None:
    residency = Residency(100)
    pinned = put(residency, resident("a", 60, keep_alive=0.0, is_pinned=True))
    assert actions(residency, 1e9) == []
    residency.want(resident("b", 50))
    (refusal,) = actions(residency)
    assert isinstance(refusal, Refuse)
    assert isinstance(refusal.error, CapacityError)
    assert "a, which must stay (pin)" in str(refusal.error)
    residency.stop(pinned)
    assert actions(residency) == [Unload(pinned, "stopped")], "whoever pinned it may unload it"


def test_keep_alive_runs_from_the_last_release() -> None:
    residency = Residency(100)
    model = put(residency, resident("a", 10, keep_alive=300.0))
    residency.lease(model, None)
    residency.lease(model, None)
    residency.release(model, 100.0)
    assert residency.next_expiry() is None
    assert actions(residency, 1e9) == []
    residency.release(model, 200.0)
    assert residency.next_expiry() == 500.0
    assert actions(residency, 499.9) == []
    assert actions(residency, 500.0) == [Unload(model, "expired")]


@pytest.mark.parametrize(
    ("wishes", "expires_at"), [((7.0,), 17.0), ((7.0, None), 17.0), ((7.0, -1.0), None), ((-1.0, 0.0), 10.0)]
)
def test_the_latest_wish_counts(wishes: tuple[float | None, ...], expires_at: float | None) -> None:
    residency = Residency(100)
    model = put(residency, resident("a", 10))
    for wish in wishes:
        residency.lease(model, wish)
    for _ in wishes:
        residency.release(model, 10.0)
    assert model.expires_at == expires_at == residency.next_expiry()


def test_a_failed_load_gives_its_room_back() -> None:
    residency = Residency(100)
    failing, next_one = resident("a", 80), resident("b", 80)
    residency.want(failing)
    residency.want(next_one)
    assert actions(residency) == [Load(failing)]
    residency.gone(failing)
    assert actions(residency) == [Load(next_one)]


def test_a_dead_model_goes_although_it_is_on_lease() -> None:
    residency = Residency(100)
    dead = put(residency, resident("a", 80))
    residency.lease(dead, None)
    assert residency.drop(dead) == Unload(dead, "died")
    assert not residency.can_lease(dead)
    residency.gone(dead)
    again = put(residency, resident("a", 80))
    residency.release(dead, 1.0)
    assert again.num_leases == 0
    residency.gone(dead)
    assert residency.find(again.source.weights) is again


def test_kv_cache_leaves_room_for_models_to_come() -> None:
    residency = Residency(1000)
    first = resident("a", 100)
    residency.want(first)
    actions(residency)
    assert residency.kv_share(first, weight_bytes=200, useful_bytes=0) == 400
    assert (first.size, residency.used) == (600, 600)
    second = resident("b", 100)
    residency.want(second)
    actions(residency)
    assert residency.kv_share(second, weight_bytes=100, useful_bytes=250) == 250
    assert residency.used == 950


def test_the_last_model_that_may_come_gets_all_that_is_left() -> None:
    residency = Residency(1000, max_models=1)
    only = resident("a", 100)
    residency.want(only)
    actions(residency)
    assert residency.kv_share(only, weight_bytes=100, useful_bytes=0) == 900


def test_each_of_a_number_of_models_gets_the_same_whoever_came_before() -> None:
    residency = Residency(1000, max_models=2)
    shares = []
    for name in "abcd":
        new = resident(name, 100)
        residency.want(new)
        for action in actions(residency):
            if isinstance(action, Unload):
                residency.gone(action.resident)
        assert actions(residency) in ([], [Load(new)])
        shares.append(residency.kv_share(new, weight_bytes=100, useful_bytes=0))
        residency.loaded(new, float(len(shares)))
    assert shares == [400] * 4
    assert residency.used == 1000


def test_a_large_model_gets_what_is_useful_beyond_its_part() -> None:
    residency = Residency(1000, max_models=2)
    large = resident("a", 600)
    residency.want(large)
    actions(residency)
    assert residency.kv_share(large, weight_bytes=600, useful_bytes=150) == 150


def test_a_cache_has_no_more_than_its_requests_could_use() -> None:
    residency = Residency(1000)
    small = resident("a", 100)
    residency.want(small)
    actions(residency)
    assert residency.kv_share(small, weight_bytes=100, useful_bytes=50, most_bytes=70) == 70
    assert residency.used == 170


def test_weights_that_are_more_than_expected_leave_nothing_for_the_cache() -> None:
    residency = Residency(1000)
    model = resident("a", 100)
    residency.want(model)
    actions(residency)
    assert residency.kv_share(model, weight_bytes=1100, useful_bytes=50) == 0


def over(base: str, adapter: str | None, size: int, shared_size: int) -> Resident:
    location = None if adapter is None else LocalPath(Path(adapter))
    source = ModelSource(f"{base}+{adapter}", LocalPath(Path(base)), adapter=location)
    return Resident(source, size, keep_alive=-1.0, shared_size=shared_size)


def test_shared_weights_count_once_and_until_the_last_one_goes() -> None:
    residency = Residency(1000)
    residents = [over("a", adapter, 50, 600) for adapter in (None, "x", "y")]
    for each in residents:
        put(residency, each)
    assert residency.used == 750
    # What was measured may differ from what was expected.
    residents[1].shared_size = 610
    assert residency.used == 760
    for each, used in zip(residents, (710, 650, 0), strict=True):
        residency.stop(each)
        assert actions(residency) == [Unload(each, "stopped")]
        residency.gone(each)
        assert residency.used == used


def test_room_for_a_cache_beside_shared_weights() -> None:
    residency = Residency(1000, max_models=2)
    put(residency, over("a", None, 100, 500))
    second = over("a", "x", 10, 500)
    residency.want(second)
    assert actions(residency) == [Load(second)]
    assert residency.kv_share(second, weight_bytes=20, useful_bytes=0) == 380
    assert residency.used == 1000


def test_all_over_a_base_go_for_a_model_that_needs_their_room() -> None:
    residency = Residency(1000)
    residents = [put(residency, over("a", adapter, 50, 600)) for adapter in ("x", "y")]
    large = resident("b", 900)
    residency.want(large)
    assert actions(residency) == [Unload(each, "evicted") for each in residents]
    residency.gone(residents[0])
    assert actions(residency) == []
    residency.gone(residents[1])
    assert actions(residency) == [Load(large)]
