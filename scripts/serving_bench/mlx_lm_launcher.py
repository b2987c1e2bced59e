"""mlx_lm.server on mlxserve's terms: the same BLAS, and answers that go on to the wanted length.

Usage: python mlx_lm_launcher.py THREADS [mlx_lm.server's own arguments]

Its API cannot ignore end-of-sequence tokens, and a logit bias against them would slow it down. So its tokenizer names
none here, which costs nothing. Everything else is mlx_lm.server as installed.
"""

import sys

from mlxserve import blas


def main() -> None:
    blas.preload(int(sys.argv.pop(1)))
    # Only now: these import mlx, which must find the BLAS already there.
    from mlx_lm import server
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    TokenizerWrapper.eos_token_ids = property(lambda self: set())
    server.main()


if __name__ == "__main__":
    main()
