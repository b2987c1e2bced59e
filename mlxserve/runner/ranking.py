"""The order of tokens by logit, and sums along it: what every cut and every list of the most likely tokens rests on."""

import mlx.core as mx

CUMSUM_BLOCK = 256


def most_likely(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Ids and logits, (S, count) each, of the first `count` tokens of the ranking; logits are (S, V) float32.

    One integer key a token carries both its logit (bits made to sort as integers) and its id, so that equal logits
    have an order and the partition returns ids without an indirect sort.
    """
    vocab_size = logits.shape[-1]
    bits = (logits + 0.0).view(mx.int32)  # adding 0.0 turns -0.0, equal to 0.0 and of different bits, into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.astype(mx.int64) << 32) | (vocab_size - 1 - mx.arange(vocab_size)).astype(mx.int64)
    if count < vocab_size:
        keys = mx.partition(keys, vocab_size - count, axis=-1)[:, vocab_size - count :]
    keys = mx.sort(keys, axis=-1)[:, ::-1]
    token_ids = vocab_size - 1 - (keys & 0xFFFFFFFF).astype(mx.int32)
    return token_ids, mx.take_along_axis(logits, token_ids, axis=-1)


def cumsum(weights: mx.array) -> mx.array:
    """Cumulative sum along the last axis, in blocks: a plain float32 one loses what a long tail adds."""
    num_rows, length = weights.shape
    blocks = mx.pad(weights, [(0, 0), (0, -length % CUMSUM_BLOCK)]).reshape(num_rows, -1, CUMSUM_BLOCK)
    inner = mx.cumsum(blocks, axis=-1)
    outer = mx.cumsum(inner[:, :, -1], axis=-1, inclusive=False)
    return (inner + outer[:, :, None]).reshape(num_rows, -1)[:, :length]
