from helpers_scheduler import make_kv, make_request

from mlxserve.core.request import Request
from mlxserve.core.step import BlockCopy
from mlxserve.kv.manager import KVManager, PrefixHit

PROMPT = list(range(100, 120))


def compute(kv: KVManager, request: Request, num_tokens: int | None = None) -> list[BlockCopy]:
    """Admit with what is cached, then do what a finished forward over `num_tokens` does."""
    hit = kv.find_cached_prefix(request)
    copies = kv.admit(request, hit)
    kv.finish_copies(copies)
    request.num_computed_tokens = request.num_tokens if num_tokens is None else num_tokens
    kv.publish(request)
    return copies


def hit_tokens(kv: KVManager, prompt: list[int], salt: str | None = None) -> int:
    request = make_request("probe", prompt, cache_salt=salt)
    num_tokens = kv.find_cached_prefix(request).num_tokens
    kv.free(request)
    return num_tokens


def test_a_hit_is_exact_to_the_token_and_leaves_the_last_one() -> None:
    kv = make_kv(32)
    first = make_request("first", PROMPT)
    compute(kv, first)
    kv.free(first)
    for length in range(1, 21):
        assert hit_tokens(kv, PROMPT[:length]) == length - 1
    assert hit_tokens(kv, [*PROMPT, 1, 2]) == 20
    assert hit_tokens(kv, [*PROMPT[:11], 1, 2]) == 11
    assert hit_tokens(kv, [1, *PROMPT]) == 0
    kv.check_integrity([])


def test_full_blocks_are_shared_and_the_rest_is_copied() -> None:
    kv = make_kv(32)
    first, second = make_request("first", PROMPT), make_request("second", [*PROMPT[:18], 1, 2, 3])
    compute(kv, first)
    kv.free(first)
    hit = kv.find_cached_prefix(second)
    (copy,) = kv.admit(second, hit)
    (table,) = kv.block_tables(second)
    assert hit.num_tokens == 18
    assert (copy.group, copy.target, copy.num_tokens) == (0, table[2], 2)
    assert copy.source not in table
    # The pin is the only thing that keeps the source now.
    assert kv.num_used_blocks == 4
    kv.finish_copies([copy])
    assert kv.num_used_blocks == 3
    kv.check_integrity([second])


def test_blocks_being_written_are_not_hit_before_they_are_published() -> None:
    kv = make_kv(32)
    first = make_request("first", PROMPT)
    kv.admit(first, kv.find_cached_prefix(first))
    waiting = make_request("waiting", PROMPT)
    assert kv.find_cached_prefix(waiting) == PrefixHit(0, is_growing=True)
    first.num_computed_tokens = 8
    kv.publish(first)
    growing = kv.find_cached_prefix(waiting)
    assert (growing.num_tokens, growing.is_growing) == (8, True)
    first.num_computed_tokens = 19
    kv.publish(first)
    hit = kv.find_cached_prefix(waiting)
    # The last 3 of the 19 before the last token, in a block that its owner goes on writing to.
    assert (hit.num_tokens, hit.is_growing) == (19, False)


def test_who_waits_for_a_prefix_goes_on_when_its_computer_is_gone() -> None:
    kv = make_kv(32)
    first, waiting = make_request("first", PROMPT), make_request("waiting", PROMPT)
    kv.admit(first, kv.find_cached_prefix(first))
    assert kv.find_cached_prefix(waiting).is_growing
    first.num_computed_tokens = 3
    kv.free(first)
    hit = kv.find_cached_prefix(waiting)
    assert (hit.num_tokens, hit.is_growing) == (3, False)


def test_the_next_turn_hits_on_prompt_and_answer() -> None:
    kv = make_kv(32)
    first = make_request("first", PROMPT)
    compute(kv, first)
    for token in range(30):
        first.token_ids.append(token)
        kv.extend(first, first.num_tokens)
        first.num_computed_tokens = first.num_tokens
        kv.publish(first)
    kv.free(first)
    assert hit_tokens(kv, [*PROMPT, *range(30), 7, 7]) == 50


def test_other_salts_and_models_do_not_hit() -> None:
    kv = make_kv(32)
    first = make_request("first", PROMPT, cache_salt="a")
    compute(kv, first)
    kv.free(first)
    assert hit_tokens(kv, PROMPT, salt="a") == 19
    assert hit_tokens(kv, PROMPT, salt="b") == 0
    assert hit_tokens(kv, PROMPT, salt="") == 0
    assert hit_tokens(kv, PROMPT) == 0


def test_no_hits_with_prefix_caching_off() -> None:
    kv = make_kv(32, enable_prefix_caching=False)
    first = make_request("first", PROMPT)
    compute(kv, first)
    kv.free(first)
    assert hit_tokens(kv, PROMPT) == 0
    assert kv.num_cached_blocks == 0
    kv.check_integrity([])


def test_the_head_of_a_prompt_outlives_its_tail() -> None:
    kv = make_kv(5)
    first = make_request("first", PROMPT)
    compute(kv, first)
    kv.free(first)
    other = make_request("other", range(9))
    kv.admit(other, kv.find_cached_prefix(other))
    assert hit_tokens(kv, PROMPT) == 16
    kv.extend(other, 17)
    assert hit_tokens(kv, PROMPT) == 8
    kv.extend(other, 25)
    assert hit_tokens(kv, PROMPT) == 0


def test_admission_counts_hits_that_nobody_holds() -> None:
    kv = make_kv(5)
    first = make_request("first", PROMPT[:16])
    compute(kv, first)
    kv.free(first)
    holder = make_request("holder", range(9))
    kv.admit(holder, kv.find_cached_prefix(holder))
    second = make_request("second", [*PROMPT[:16], 1, 2])
    hit = kv.find_cached_prefix(second)
    assert hit.num_tokens == 16
    assert not kv.can_admit(second, hit)
    kv.free(holder)
    assert kv.can_admit(second, hit, reserve=1)
    assert not kv.can_admit(second, hit, reserve=2)


def test_a_request_that_just_fits_does_without_the_copy() -> None:
    kv = make_kv(4)
    first = make_request("first", PROMPT)
    compute(kv, first)
    kv.free(first)
    second = make_request("second", [*PROMPT[:18], 1, 2, 3])
    hit = kv.find_cached_prefix(second)
    assert (hit.num_tokens, hit.tails) == (16, ())
    assert kv.can_admit(second, hit)
    assert kv.admit(second, hit) == []


def test_without_groups_everything_fits_and_nothing_is_kept() -> None:
    kv = KVManager([], block_size=8, model_id="m")
    request = make_request("r", PROMPT)
    assert kv.max_tokens is None
    hit = kv.find_cached_prefix(request)
    assert kv.can_admit(request, hit, reserve=99)
    assert compute(kv, request) == []
    assert kv.can_extend(request, 10**6)
    kv.extend(request, 10**6)
    assert kv.block_tables(request) == ()
    assert (kv.num_blocks, kv.max_blocks) == ((), 0)
    kv.free(request)
    assert hit_tokens(kv, PROMPT) == 0
