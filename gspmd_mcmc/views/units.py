"""Numbers for people."""


def size(num_bytes: float) -> str:
    """Write a number of bytes for people: 622,608 bytes are 623 kB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"
