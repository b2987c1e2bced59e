from collections import Counter

import pytest

from mlxserve.errors import ConfigError, EngineError
from mlxserve.kv.block_hash import BlockHash, block_hash, root_hash
from mlxserve.kv.block_pool import BlockContent, BlockPool, CacheIntegrityError

ROOT = root_hash("model", None)


def full(parent: BlockHash, *token_ids: int) -> BlockContent:
    return BlockContent(parent, token_ids, block_hash(parent, token_ids))


def partial(parent: BlockHash, *token_ids: int) -> BlockContent:
    return BlockContent(parent, token_ids, None)


def cached_block(pool: BlockPool, content: BlockContent) -> int:
    block_id = pool.take()
    pool.publish(block_id, content)
    pool.release(block_id)
    return block_id


def test_hashes_depend_on_everything_before() -> None:
    roots = [
        root_hash("model", None),
        root_hash("model", ""),
        root_hash("model", "salt"),
        root_hash("models", "alt"),
        root_hash("other", None),
    ]
    hashes = [block_hash(root, (1, 2)) for root in roots]
    hashes += [block_hash(ROOT, (1, 3)), block_hash(ROOT, (1, 2, 0)), block_hash(hashes[0], (1, 2))]
    assert len(set(hashes)) == len(hashes)
    assert block_hash(ROOT, [1, 2]) == hashes[0]
    assert all(len(name) >= 16 for name in hashes)


def test_it_grows_by_doubling_and_never_hands_out_block_0() -> None:
    pool = BlockPool(max_blocks=21, initial_blocks=4)
    sizes, taken = [], []
    while pool.num_available:
        taken.append(pool.take())
        sizes.append(pool.num_blocks)
    assert taken == list(range(1, 21))
    assert sorted(set(sizes)) == [4, 8, 16, 21]
    with pytest.raises(EngineError, match="all 21 KV blocks are in use"):
        pool.take()
    pool.check_integrity(Counter(taken))


def test_a_pool_without_room_for_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_bytes"):
        BlockPool(max_blocks=1)


def test_free_blocks_go_before_growth_and_growth_before_eviction() -> None:
    pool = BlockPool(max_blocks=6, initial_blocks=3)
    kept = cached_block(pool, full(ROOT, 1, 2))
    empty = pool.take()
    pool.release(empty)
    assert pool.take() == empty
    assert [pool.take() for _ in range(3)] == [3, 4, 5]
    assert pool.find(block_hash(ROOT, (1, 2))) == kept
    assert pool.take() == kept
    assert pool.find(block_hash(ROOT, (1, 2))) is None
    assert pool.find_tail(ROOT, (1, 2)) is None


def test_eviction_is_least_recently_used_first() -> None:
    pool = BlockPool(max_blocks=4, initial_blocks=4)
    first, second, third = (cached_block(pool, full(ROOT, token)) for token in (1, 2, 3))
    pool.hold(first)
    pool.release(first)
    assert [pool.take() for _ in range(3)] == [second, third, first]


def test_a_held_block_is_not_evicted_and_stays_hittable() -> None:
    pool = BlockPool(max_blocks=3, initial_blocks=3)
    shared = cached_block(pool, full(ROOT, 1, 2))
    pool.hold(shared)
    pool.hold(shared)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 0, 1)
    pool.release(shared)
    pool.take()
    assert pool.num_available == 0
    assert pool.find(block_hash(ROOT, (1, 2))) == shared


def test_the_second_block_of_the_same_content_does_not_answer() -> None:
    pool = BlockPool(max_blocks=8)
    first = cached_block(pool, full(ROOT, 1, 2, 3))
    second, third = pool.take(), pool.take()
    pool.publish(second, full(ROOT, 1, 2, 3))
    pool.publish(third, partial(ROOT, 1, 2))
    pool.release(second)
    pool.release(third)
    assert pool.find(block_hash(ROOT, (1, 2, 3))) == first
    assert pool.num_cached == 1
    pool.check_integrity(Counter())


def test_the_tail_with_the_most_shared_tokens_is_found() -> None:
    pool = BlockPool(max_blocks=8)
    short = cached_block(pool, partial(ROOT, 1, 2))
    long = cached_block(pool, full(ROOT, 1, 2, 3, 4))
    cached_block(pool, full(block_hash(ROOT, (9,)), 1, 2, 3, 4))
    assert pool.find_tail(ROOT, (1, 2, 3, 9)) == (long, 3)
    assert pool.find_tail(ROOT, (1, 2)) == (short, 2)
    assert pool.find_tail(ROOT, (7, 1, 2)) is None
    assert pool.find_tail(ROOT, ()) is None


def test_shared_blocks_are_counted() -> None:
    pool = BlockPool(8)
    shared, alone = pool.take(), pool.take()
    counts = [pool.num_shared]
    for change in (pool.hold, pool.hold, pool.release, pool.release):
        change(shared)
        counts.append(pool.num_shared)
    assert counts == [0, 1, 1, 1, 0]
    pool.check_integrity(Counter({shared: 1, alone: 1}))


def test_releasing_too_often_is_an_error() -> None:
    pool = BlockPool(max_blocks=4)
    block_id = pool.take()
    pool.release(block_id)
    with pytest.raises(CacheIntegrityError, match="more often than held"):
        pool.release(block_id)


def test_integrity_check_sees_what_is_wrong() -> None:
    def broken(damage: str) -> None:
        pool = BlockPool(max_blocks=8)
        held = pool.take()
        kept = cached_block(pool, full(ROOT, 1))
        pool.check_integrity(Counter([held]))
        exec(damage, {"pool": pool, "held": held, "kept": kept})
        with pytest.raises(CacheIntegrityError):
            pool.check_integrity(Counter([held]))

    broken("pool.take()")
    broken("pool.hold(kept)")
    broken("pool.release(held)")
    broken("pool._free.append(pool._free[0])")
    broken("pool._free.append(kept)")
    broken("pool._free.append(0)")
    broken("pool._free.pop()")
    broken("pool._cached.clear()")
    broken("pool._by_hash.clear()")
    broken("pool._children.clear()")
    broken("pool._blocks[held].ref_count = 2")
    broken("pool._blocks[kept].content = None")


def test_does_not_grow_only_to_keep_what_nobody_holds() -> None:
    pool = BlockPool(max_blocks=100, initial_blocks=9)
    blocks = [pool.take() for _ in range(8)]
    for index, block in enumerate(blocks):
        tokens = (index,) * 4
        pool.publish(block, BlockContent(root_hash("m", None), tokens, block_hash(root_hash("m", None), tokens)))
        pool.release(block)
    assert (pool.num_cached, pool.num_blocks) == (8, 9)
    held = [pool.take() for _ in range(2)]
    assert (pool.num_cached, pool.num_blocks) == (6, 9), "nobody holds anything: the oldest two give way"
    held += [pool.take() for _ in range(2)]
    assert pool.num_cached >= 5, "a third is in use: the pool grows and keeps the rest"
    assert pool.num_blocks == 18
    pool.check_integrity(Counter(held))
