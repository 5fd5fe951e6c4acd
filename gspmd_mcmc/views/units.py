"""Numbers for people."""

LARGE_BYTES = 1_000_000  # what is whole on every device and of this size or more is pointed out

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def bytes_text(num_bytes: float) -> str:
    """Write a number of bytes with a decimal unit: ``784 B``, ``31.4 kB``, ``2 GB``."""
    value, unit = float(num_bytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    digits = f"{value:.1f}".removesuffix(".0") if unit and value < 99.95 else f"{value:.0f}"
    return f"{digits} {_UNITS[unit]}"
