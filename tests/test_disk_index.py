"""The index of blocks on disk: bound, order of removal, chains. Random tests print their seed."""

import os
import random

from mlxserve.kv.block_hash import BlockHash, block_hash, root_hash
from mlxserve.kv.disk_index import DiskIndex, DiskKey

SEED = int(os.environ.get("MLXSERVE_TEST_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)


def name(text: str) -> BlockHash:
    return BlockHash(text.encode())


def key(text: str, model: str = "m") -> DiskKey:
    return DiskKey(model, name(text))


def add_written(index: DiskIndex, block: str, parent: str = "root", num_bytes: int = 10) -> list[DiskKey] | None:
    removed = index.add(key(block), name(parent), num_bytes)
    index.mark_written(key(block))
    return removed


def test_names_of_blocks_are_the_same_in_every_process() -> None:
    """They are file names: a change of the hash must come with a change of the file format."""
    root = root_hash("0123456789abcdef", None)
    first = block_hash(root, range(64))
    assert root.hex() == "4ab78fa00f026dcbf6a90ffaf1190d28"
    assert first.hex() == "feadbab11b7885169a26ff233278400c"
    assert block_hash(first, range(64)).hex() == "147ead575234f247b0fc19b45f24b9bc"


def test_the_least_recently_used_goes_first() -> None:
    index = DiskIndex(30)
    for block in "abc":
        assert add_written(index, block) == []
    index.touch(key("a"))
    assert add_written(index, "d") == [key("b")]
    assert add_written(index, "e", num_bytes=20) == [key("c"), key("a")]
    assert index.total_bytes == 30
    assert key("b") not in index


def test_a_chain_loses_its_end_first() -> None:
    index = DiskIndex(40)
    for block, parent in ("ar", "ba", "cb"):
        add_written(index, block, parent.replace("r", "root"))
    assert add_written(index, "x") == []
    # The end is used: so are those it is of no use without.
    index.touch(key("c"))
    assert add_written(index, "y") == [key("x")]
    assert add_written(index, "z") == [key("c")]
    assert add_written(index, "w") == [key("b")]


def test_a_chain_longer_than_the_bound_keeps_its_beginning() -> None:
    index = DiskIndex(30)
    add_written(index, "x")
    for block, parent in (("a", "root"), ("b", "a"), ("c", "b")):
        assert add_written(index, block, parent) is not None
    assert add_written(index, "d", "c") is None
    assert all(key(block) in index for block in "abc")


def test_what_is_larger_than_the_bound_is_not_taken() -> None:
    index = DiskIndex(30)
    add_written(index, "a")
    assert add_written(index, "b", num_bytes=31) is None
    assert key("a") in index
    assert key("b") not in index


def test_what_is_read_or_written_stays() -> None:
    index = DiskIndex(20)
    add_written(index, "a")
    index.add(key("b"), name("root"), 10)
    index.begin_read(key("a"))
    assert not index.is_written(key("b"))
    assert add_written(index, "c") is None
    index.end_read(key("a"))
    assert add_written(index, "c") == [key("a")]
    index.mark_written(key("b"))
    assert add_written(index, "d") == [key("b")]


def test_models_share_the_bound_and_not_their_blocks() -> None:
    index = DiskIndex(20)
    add_written(index, "a")
    assert key("a", "other") not in index
    assert index.add(key("a", "other"), name("root"), 15) == [key("a")]
    assert (index.num_blocks("m"), index.num_bytes("m")) == (0, 0)
    assert (index.num_blocks("other"), index.num_bytes("other")) == (1, 15)


def test_random_use_keeps_the_bound_and_the_heads_of_chains() -> None:
    print(f"replay with MLXSERVE_TEST_SEED={SEED}")
    rng = random.Random(SEED)
    num_removed = 0
    for _ in range(50):
        index = DiskIndex(rng.choice([30, 100, 300]))
        sizes: dict[DiskKey, int] = {}
        parents: dict[DiskKey, DiskKey] = {}
        chains = [[name("root")] for _ in range(4)]
        for number in range(200):
            chain = rng.choice(chains)
            if rng.random() < 0.2:
                del chain[rng.randrange(len(chain)) + 1 :]
            while len(chain) > 1 and DiskKey("m", chain[-1]) not in index:
                chain.pop()
            block = DiskKey("m", name(f"{number}"))
            num_bytes = rng.choice([5, 10, 10, 25])
            removed = index.add(block, chain[-1], num_bytes)
            if removed is not None:
                index.mark_written(block)
                sizes[block] = num_bytes
                parents[block] = DiskKey("m", chain[-1])
                chain.append(block.name)
                for gone in removed:
                    del sizes[gone], parents[gone]
                num_removed += len(removed)
            if rng.random() < 0.3:
                index.touch(DiskKey("m", rng.choice(chain)))
            assert index.total_bytes == index.num_bytes("m") == sum(sizes.values()) <= index.max_bytes
            assert index.num_blocks("m") == len(sizes)
            assert all(each in index for each in sizes)
            assert all(parent in index or parent.name == name("root") for parent in parents.values())
    assert num_removed > 1000
