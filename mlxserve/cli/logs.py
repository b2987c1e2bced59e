"""Log lines on stderr, one line each."""

import logging


def configure(level: str) -> None:
    """Log mlxserve's own records from `level` up, of libraries only warnings: their debug lines hold keys."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("mlxserve").setLevel(level.upper())
