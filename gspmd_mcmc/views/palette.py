"""Colors that readers with any color vision can tell apart; devices and chains are always numbered too.

References
----------
Okabe and Ito, "Color Universal Design" (2008).
"""

from collections.abc import Iterable

ORANGE, SKY_BLUE, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
DARK_GREY = "#4D4D4D"  # in the place of Okabe and Ito's black
OKABE_ITO = (ORANGE, SKY_BLUE, GREEN, YELLOW, BLUE, VERMILION, PURPLE, DARK_GREY)
# Ten steps of matplotlib's viridis: lightness alone tells them apart.
VIRIDIS = (
    "#440154", "#482878", "#3E4989", "#31688E", "#26828E",
    "#1F9E89", "#35B779", "#6ECE58", "#B5DE2B", "#FDE725",
)  # fmt: skip
WHOLE = "#D9D9D9"  # of blocks that every device holds


def distinct_colors(numbers: Iterable[int]) -> dict[int, str]:
    """Give up to eight devices a color each, by their number: device 3 looks the same everywhere."""
    ordered = sorted(numbers)
    by_number = {n: OKABE_ITO[n % len(OKABE_ITO)] for n in ordered}
    if len(set(by_number.values())) == len(ordered):
        return by_number
    return dict(zip(ordered, OKABE_ITO, strict=False))


def gradient(numbers: Iterable[int]) -> dict[int, str]:
    """Give any number of devices a color each, from dark to light in their order."""
    ordered = sorted(numbers)
    last = max(len(ordered) - 1, 1)
    return {n: _between(VIRIDIS, rank / last) for rank, n in enumerate(ordered)}


def ink(color: str) -> str:
    """Return black or white, whichever stands out more on a color (WCAG 2 relative luminance)."""
    return "#000000" if luminance(color) > 0.179 else "#FFFFFF"


def luminance(color: str) -> float:
    """Return the relative luminance of ``#RRGGBB``, as WCAG 2 defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def channels(color: str) -> list[float]:
    """Return red, green and blue of ``#RRGGBB``, each from 0 to 1."""
    return [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def _between(stops: tuple[str, ...], where: float) -> str:
    below = min(int(where * (len(stops) - 1)), len(stops) - 2)
    part = where * (len(stops) - 1) - below
    pairs = zip(channels(stops[below]), channels(stops[below + 1]), strict=True)
    return "#" + "".join(f"{round(255 * (a + part * (b - a))):02X}" for a, b in pairs)
