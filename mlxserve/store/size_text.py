"""Sizes for people to read."""


def size_text(num_bytes: float) -> str:
    """Decimal, as Ollama has it: '2.3 GB'."""
    for unit, bytes_each in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if num_bytes >= bytes_each:
            number = num_bytes / bytes_each
            return f"{number:.1f} {unit}" if number < 100 else f"{number:.0f} {unit}"
    return f"{num_bytes:.0f} B"
