"""Colours that readers with any colour vision can tell apart.

Okabe and Ito, "Color Universal Design" (2008).
"""

ORANGE, SKY_BLUE, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
