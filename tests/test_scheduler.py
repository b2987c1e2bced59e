"""What the scheduler puts into a step: chunks and rows, cached prefixes, too few blocks, and who is let in."""

import pickle

import pytest
from helpers_scheduler import BLOCK_SIZE, NO_EOS, Driver, chunk_sizes, decoding, make_request, make_scheduler, prompt

from mlxserve.core.request import FinishReason, RequestStatus
from mlxserve.errors import ContextLengthExceeded, InvalidParameter, QueueFull

# --- what a step holds ---


def test_a_prompt_and_its_first_token_fit_into_one_step() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_request("a", prompt(10), max_tokens=3, **NO_EOS))
    step = driver.step()
    assert chunk_sizes(step) == {"a": 9}
    assert decoding(step) == ["a"]
    assert pickle.loads(pickle.dumps(step)) == step
    step = driver.step()
    assert step is not None
    assert (chunk_sizes(step), step.decode[0].start, step.decode[0].output_index) == ({}, 10, 1)
    driver.run()
    assert driver.outcomes == {"a": FinishReason.LENGTH}


def test_a_prompt_of_one_token_needs_no_chunk() -> None:
    driver = Driver(make_scheduler())
    driver.add(make_request("a", [5]))
    step = driver.step()
    assert (chunk_sizes(step), decoding(step)) == ({}, ["a"])


def test_streams_advance_beside_a_long_prompt() -> None:
    driver = Driver(make_scheduler(max_prefill_tokens=16))
    driver.add(make_request("stream", prompt(3), max_tokens=30, **NO_EOS))
    driver.step()
    driver.add(make_request("long", prompt(100, 200)))
    steps = [driver.step() for _ in range(5)]
    assert all("stream" in decoding(step) for step in steps)
    assert all(0 < chunk_sizes(step)["long"] <= 16 for step in steps)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    driver = Driver(make_scheduler(max_prefill_tokens=32))
    driver.add(make_request("long", prompt(200, 200)))
    assert chunk_sizes(driver.step()) == {"long": 32}
    driver.add(make_request("short", prompt(6)))
    step = driver.step()
    assert chunk_sizes(step)["short"] == 5
    assert "short" in decoding(step)
    # What the short one leaves goes to the long one, to the block boundary.
    assert chunk_sizes(step)["long"] == 24


def test_several_prompts_are_prefilled_in_one_step() -> None:
    driver = Driver(make_scheduler(max_prefill_tokens=200))
    driver.add(*(make_request(f"r{i}", prompt(20, 100 * i)) for i in range(1, 5)))
    step = driver.step()
    assert chunk_sizes(step) == {"r1": 19, "r2": 19, "r3": 19, "r4": 19}
    assert decoding(step) == ["r1", "r2", "r3", "r4"]


def test_prompts_that_come_together_begin_to_stream_together() -> None:
    driver = Driver(make_scheduler(1000, max_prefill_tokens=512, max_num_seqs=4))
    driver.add(*(make_request(f"r{i}", prompt(400, 1000 * i), max_tokens=9, **NO_EOS) for i in range(1, 7)))
    steps = [driver.step() for _ in range(4)]
    assert chunk_sizes(steps[0]) == dict.fromkeys(["r1", "r2", "r3", "r4"], 128)
    assert [decoding(step) for step in steps] == [[], [], [], ["r1", "r2", "r3", "r4"]]


def test_beside_streams_the_oldest_prompt_is_first_to_be_done() -> None:
    driver = Driver(make_scheduler(1000, max_prefill_tokens=512))
    driver.add(make_request("stream", prompt(3), max_tokens=30, **NO_EOS))
    driver.step()
    driver.add(*(make_request(f"r{i}", prompt(400, 1000 * i)) for i in range(1, 4)))
    sizes = chunk_sizes(driver.step())
    assert sizes["r1"] >= sizes.get("r2", 0) >= sizes.get("r3", 0)
    assert sizes["r1"] > sizes.get("r3", 0)


def test_chunks_end_with_blocks() -> None:
    driver = Driver(make_scheduler(max_prefill_tokens=20))
    driver.add(make_request("a", prompt(100)))
    ends = []
    while not driver.outcomes and (step := driver.step()) is not None and step.prefill:
        ends.append(step.prefill[0].start + len(step.prefill[0].token_ids))
    assert ends == [16, 32, 48, 64, 80, 99]


def test_never_more_running_than_max_num_seqs() -> None:
    driver = Driver(make_scheduler(max_num_seqs=2))
    driver.add(*(make_request(f"r{i}", prompt(4, 100 * i), **NO_EOS) for i in range(1, 5)))
    driver.step()
    assert (driver.scheduler.stats().num_running, driver.scheduler.stats().num_waiting) == (2, 2)
    driver.run()
    assert len(driver.outcomes) == 4


# --- prefix cache ---


def test_a_repeated_prompt_computes_one_token() -> None:
    driver = Driver(make_scheduler())
    for name in ("a", "b"):
        driver.add(make_request(name, prompt(21)))
        step = driver.step()
        driver.run()
    assert chunk_sizes(step) == {}
    assert decoding(step) == ["b"]
    assert driver.requests["b"].num_cached_tokens == 20
    stats = driver.scheduler.stats()
    assert (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens) == (42, 20)


def test_the_next_turn_of_a_chat_computes_only_what_is_new() -> None:
    driver = Driver(make_scheduler())
    first = make_request("first", prompt(21), max_tokens=30, **NO_EOS)
    driver.add(first)
    driver.run()
    second = make_request("second", [*first.token_ids, 300, 301, 302])
    driver.add(second)
    step = driver.step()
    # The last token of the answer was generated and never computed.
    assert second.num_cached_tokens == len(first.token_ids) - 1
    assert chunk_sizes(step) == {"second": 3}


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    driver = Driver(make_scheduler(max_prefill_tokens=16))
    driver.add(*(make_request(f"r{i}", [*prompt(80), i], **NO_EOS) for i in range(4)))
    driver.run()
    assert driver.runner.num_prefilled_tokens == 80
    assert [driver.requests[f"r{i}"].num_cached_tokens for i in range(4)] == [0, 80, 80, 80]


def test_who_waits_for_anothers_prefix_goes_on_when_that_one_ends() -> None:
    driver = Driver(make_scheduler(max_prefill_tokens=16))
    driver.add(make_request("a", prompt(80)), make_request("b", prompt(80)))
    driver.step()
    driver.step()
    driver.scheduler.abort("a", FinishReason.CANCELLED)
    step = driver.step()
    assert chunk_sizes(step) == {"b": 16}
    assert driver.requests["b"].num_cached_tokens == 32
    driver.run()
    assert driver.outcomes["b"] in (FinishReason.STOP, FinishReason.LENGTH)


# --- out of blocks ---


def test_the_newest_is_preempted_and_comes_back_before_newer_ones() -> None:
    driver = Driver(make_scheduler(10, max_num_seqs=4))
    old = make_request("old", prompt(30), max_tokens=40, **NO_EOS)
    new = make_request("new", prompt(20, 200), max_tokens=20, **NO_EOS)
    driver.add(old, new)
    while new.num_preemptions == 0:
        step = driver.step()
    assert step is not None
    assert (step.released, decoding(step)) == (("new",), ["old"])
    assert (new.status, new.num_computed_tokens, old.num_preemptions) == (RequestStatus.WAITING, 0, 0)
    driver.add(make_request("newest", prompt(3, 300), max_tokens=2, priority=-1, **NO_EOS))
    started = []
    while len(driver.outcomes) < 3:
        step = driver.step()
        started += [name for name in decoding(step) if name not in started]
    assert started == ["old", "new", "newest"]
    assert new.num_preemptions == 1
    assert driver.scheduler.stats().num_preemptions == 1


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    driver = Driver(make_scheduler(10, max_num_seqs=4))
    old = make_request("old", prompt(30), max_tokens=20, **NO_EOS)
    new = make_request("new", prompt(20, 200), max_tokens=40, **NO_EOS)
    driver.add(old, new)
    driver.run()
    assert new.num_preemptions > 0
    assert driver.runner.num_prefilled_tokens < 29 + 19 + new.num_preemptions * 20


def test_a_large_request_is_not_passed_over_for_ever() -> None:
    driver = Driver(make_scheduler(16, max_num_seqs=4))
    driver.add(make_request("running", prompt(40), max_tokens=60, **NO_EOS))
    driver.step()
    large = make_request("large", prompt(90, 300), max_tokens=2, **NO_EOS)
    driver.add(large)
    num_small = 0
    while large.status is RequestStatus.WAITING:
        name = f"small{num_small}"
        driver.add(make_request(name, prompt(3, 1000 + 10 * num_small), max_tokens=200 // BLOCK_SIZE, **NO_EOS))
        num_small += 1
        driver.step()
        assert num_small < 200
    assert 0 < large.num_bypassed <= 8 + 3
    driver.run()
    assert driver.outcomes["large"] is FinishReason.LENGTH


def test_a_waiting_request_leaves_running_ones_room_to_grow() -> None:
    driver = Driver(make_scheduler(7))
    driver.add(make_request("a", prompt(16), max_tokens=16, **NO_EOS))
    driver.step()
    driver.add(make_request("b", prompt(22, 300), max_tokens=12, **NO_EOS))
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0


def test_a_request_that_fills_the_whole_pool_runs() -> None:
    driver = Driver(make_scheduler(6))
    limit = driver.scheduler.max_total_tokens
    assert limit == 41
    for name in ("a", "b"):
        request = make_request(name, prompt(35), max_tokens=6, **NO_EOS)
        assert request.max_total_tokens == limit
        driver.add(request)
        driver.run()
    assert driver.outcomes == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}


# --- admission ---


def test_what_cannot_be_added() -> None:
    scheduler = make_scheduler(6, max_queue=1, max_num_seqs=1)
    with pytest.raises(ContextLengthExceeded) as too_long:
        scheduler.add(make_request("a", prompt(30), max_tokens=12))
    assert (too_long.value.num_tokens, too_long.value.limit) == (42, 41)
    with pytest.raises(ContextLengthExceeded) as no_answer:
        scheduler.add(make_request("a", prompt(30), max_total_tokens=30))
    assert (no_answer.value.num_tokens, no_answer.value.limit) == (31, 30)
    with pytest.raises(InvalidParameter, match="empty"):
        scheduler.add(make_request("a", []))
    scheduler.add(make_request("a", prompt(3)))
    with pytest.raises(InvalidParameter, match="in use"):
        scheduler.add(make_request("a", prompt(3)))
    scheduler.add(make_request("b", prompt(3)))
    with pytest.raises(QueueFull) as full:
        scheduler.add(make_request("c", prompt(3)))
    assert 1.0 <= full.value.retry_after <= 60.0
    assert scheduler.stats().num_waiting == 2
    scheduler.check_integrity()


def test_priority_orders_the_waiting_and_waiting_makes_up_for_it() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1))
    driver.add(
        make_request("low", prompt(3), priority=1, arrival_time=0.0),
        make_request("first", prompt(3), arrival_time=1.0),
        make_request("second", prompt(3), arrival_time=2.0),
        make_request("urgent", prompt(3), priority=-5, arrival_time=3.0),
        make_request("late", prompt(3), arrival_time=31.0),
        make_request("absurd", prompt(3), priority=-(10**9), arrival_time=400.0),
    )
    driver.run()
    assert list(driver.outcomes) == ["urgent", "first", "second", "low", "late", "absurd"]
