"""Names of KV blocks: chained hashes of the tokens a block and everything before it hold.

The keys and values at a position depend on every token up to it, so a block is named by H(parent, tokens), where
`parent` names the block before it. The parent of the first block is the root: a hash of what else the cache depends
on (the model, the request's salt), which the chain carries into every block.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

DIGEST_SIZE = 16
"""Bytes. A collision would hand one request's cache to another: 128 bits make it a matter of 2**64 blocks."""


def root_hash(model_id: str, cache_salt: str | None) -> BlockHash:
    """The parent of first blocks. No salt and an empty salt are different roots."""
    keys = hashlib.blake2b(digest_size=DIGEST_SIZE, person=b"kv-root")
    for key in (model_id, *(() if cache_salt is None else (cache_salt,))):
        data = key.encode("utf-8", "surrogatepass")
        keys.update(len(data).to_bytes(8, "little"))
        keys.update(data)
    return BlockHash(keys.digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The name of a full block that holds `token_ids` after the block (or root) named `parent`."""
    return BlockHash(hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=DIGEST_SIZE).digest())
