"""The summary of a run: statistics of each number, the worst first, and warnings."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_mcmc.diagnostics import advice, table
from gspmd_mcmc.diagnostics.by_group import rows_of_groups
from gspmd_mcmc.diagnostics.chance import is_chance
from gspmd_mcmc.diagnostics.columns import SMALL_LEAF, by_name, check_draws
from gspmd_mcmc.diagnostics.named_rows import rows_of_names
from gspmd_mcmc.diagnostics.rhat import LEAST_DRAWS, nested_rhat, rank_nested_rhat, rhat
from gspmd_mcmc.diagnostics.statistics import Statistics, statistics
from gspmd_mcmc.diagnostics.table import Row, element, free_name, named_leaves
from gspmd_mcmc.groups.orders import GroupLabels
from gspmd_mcmc.multihost.processes import to_host
from gspmd_mcmc.placement.explicit import on_any_mesh
from gspmd_mcmc.tree import PyTree

MAX_ROWS = 20
# What is judged, and the sign that makes the worst the largest. A mean is bad if it is not finite.
SIGNS = {
    **{"nested_rhat": 1.0, "rhat": 1.0, "rhat_beyond_noise": 1.0},
    **{"ess_bulk": -1.0, "ess_tail": -1.0, "spacings": -1.0, "mean": 1.0},
}


class Worst(NamedTuple):
    """A number by name, ``w[3, 1]``, and the value of its statistic."""

    name: str
    value: float


class Extreme(NamedTuple):
    """The worst number of a large leaf by one statistic."""

    name: str  # ``w[3, 1]``
    values: dict[str, float]  # all its statistics
    count: int  # of numbers of the leaf that are beyond the limit of the statistic


@dataclass(frozen=True, eq=False)
class _Leaf:
    """A leaf of the draws: the rows of a small one, on the host, or the extremes of a large one."""

    name: str
    size: int
    rows: list[Row]
    extremes: dict[str, Extreme]
    by_chance: float  # of its numbers, how many exceed the limit of R-hat if chains agree
    least_p_value: float  # of those that exceed it; 1 if none does

    @classmethod
    def of(
        cls, name: str, found: dict[str, Any], limits: dict[str, float], groups: GroupLabels | None
    ) -> "_Leaf":
        """Return a leaf, from the arrays [...] of its statistics and what is judged by which limit."""
        size = found["mean"].size
        if size <= SMALL_LEAF:
            rows = [
                Row(element(name, index, groups), 1, {key: float(x[index]) for key, x in found.items()})
                for index in np.ndindex(np.shape(found["rhat"]))
            ]
            over = (row for row in rows if row.values["rhat_beyond_noise"] > advice.MOST_RHAT)
            least_p_value = min((row.values["rhat_p_value"] for row in over), default=1.0)
            by_chance = sum(row.values["rhat_by_chance"] for row in rows)
            return cls(name, size, rows, {}, by_chance, least_p_value)
        judged = {"rhat": advice.MOST_RHAT} | limits
        extremes = {key: _extreme_of(name, found, key, limit, groups) for key, limit in judged.items()}
        worst = extremes.get("nested_rhat", extremes["rhat"])
        least = {key: extremes[key].values[key] for key in ("ess_bulk", "ess_tail")}
        row = Row(worst.name, size, worst.values | least)
        by_chance, least_p_value = map(float, _chance(found))
        return cls(name, size, [row], extremes, by_chance, least_p_value)

    def worst(self, statistic: str) -> list[Worst]:
        """Return its numbers with their values; for a large leaf only the worst one."""
        numbers = [self.extremes[statistic]] if self.extremes else self.rows
        return [Worst(number.name, number.values[statistic]) for number in numbers]

    def num_beyond(self, statistic: str, limit: float) -> int:
        if self.extremes:
            return self.extremes[statistic].count
        return sum(is_beyond(row.values[statistic], statistic, limit) for row in self.rows)


@dataclass(frozen=True, eq=False, repr=False)
class Summary:
    """Statistics of a run, a table of the worst of them, and warnings. ``print`` it.

    Attributes
    ----------
    mean, sd, mcse_mean, mcse_sd, q5, q95, ess_bulk, ess_tail, rhat
        Trees like the draws, leaves [...]: over all chains the mean, the standard deviation and their
        Monte Carlo errors, the quantiles at 5 % and 95 %, effective sample sizes, R-hat.
    nested_rhat
        The same of nested R-hat, if superchains were given; otherwise None.
    rhat_beyond_noise
        R-hat where chains disagree, and 1 where R-hat is large only because chains are short: they
        differ from each other no more than each in its halves. With fewer than 32 chains or 100 draws
        it is R-hat itself.
    rhat_by_chance
        The probability that R-hat exceeds 1.01 although all chains agree. It is 0 where chance is not
        an excuse: with fewer than 100 effective draws per chain, and with 32 chains or more.
    rhat_p_value
        Likewise the probability that chance makes R-hat as large as it is.
    spacings
        The standard deviation over the spacing of floating-point numbers near the mean.
    log_density
        The same statistics of the log density, scalars by name.
    warnings
        Problems in plain words, each with what to do.
    notes
        What holds for all draws of this kernel, but no statistic shows.
    rows
        The lines of the table, the worst first: of numbers, or of groups.
    num_left_out
        How many numbers or groups have no line, because no R-hat of theirs is larger than those shown.
    names
        The leaves and numbers that the table is limited to; None if it has them all.
    groups
        The name of the groups that have a line each; None if numbers have.
    num_chains, num_draws
        Chains, and draws of each.
    rhat_before_moves
        Where warm-up has moved chains: R-hat of the log density as if each had stayed where it was;
        otherwise None.
    """

    mean: PyTree
    sd: PyTree
    mcse_mean: PyTree
    mcse_sd: PyTree
    q5: PyTree
    q95: PyTree
    ess_bulk: PyTree
    ess_tail: PyTree
    rhat: PyTree
    rhat_beyond_noise: PyTree
    rhat_by_chance: PyTree
    rhat_p_value: PyTree
    spacings: PyTree
    nested_rhat: PyTree
    log_density: dict[str, float]
    warnings: list[str]
    notes: list[str]
    rows: list[Row]
    num_left_out: int
    names: tuple[str, ...] | None
    groups: str | None
    num_chains: int
    num_draws: int
    rhat_before_moves: float | None
    _leaves: list[_Leaf]

    def worst(self, statistic: str = "rhat") -> Worst:
        """Return the worst of all numbers by "rhat", "nested_rhat", "ess_bulk" or "ess_tail"."""
        if statistic not in SIGNS or getattr(self, statistic) is None:
            raise ValueError(
                f"worst: expected rhat, ess_bulk, ess_tail, or nested_rhat where num_superchains was "
                f"given, got {statistic!r}"
            )
        found = _worst_first(self._leaves, statistic)
        if not found:
            raise ValueError("worst: the draws have no numbers")
        return found[0]

    def to_dict(self) -> dict[str, dict[str, np.ndarray]]:
        """Return arrays [...] on the host, by the name of the leaf and then of the statistic."""
        found = {name: self[name] for name in named_leaves(self.mean)}
        log_density = {key: np.asarray(value) for key, value in self.log_density.items()}
        return {**found, free_name("log_density", found): log_density}

    def __getitem__(self, name: str) -> dict[str, np.ndarray]:
        """Return the statistics of a leaf by name, arrays [...] on the host."""
        names = list(named_leaves(self.mean))
        if name not in names:
            raise KeyError(f"{name!r}: the draws have {names}")
        trees = {key: getattr(self, key) for key in (*Statistics._fields, "nested_rhat")}
        return {
            key: np.asarray(to_host(named_leaves(tree)[name]))
            for key, tree in trees.items()
            if tree is not None
        }

    def __str__(self) -> str:
        return table.text(self)

    __repr__ = __str__

    def __rich__(self) -> Any:
        return table.rich(self)

    def _repr_mimebundle_(self, include: Any, exclude: Any, **options: Any) -> dict[str, str]:
        from rich.jupyter import JupyterMixin  # Here, since draws come without a table to show.

        return JupyterMixin._repr_mimebundle_(self, include, exclude, **options)  # pyright: ignore


@on_any_mesh
def summarize(
    position: PyTree,
    stats: dict[str, Any],
    *,
    num_superchains: int | None = None,
    max_rows: int = MAX_ROWS,
    names: str | Iterable[str] | None = None,
    groups: str | None = None,
    labels: Mapping[str, GroupLabels] = MappingProxyType({}),
    max_tree_depth: int | None = None,
    judges_energy: bool = True,
    thin: int = 1,
    moves: Sequence[Any] = (),
    note: str = "",
    losses: Sequence[str] = (),
) -> Summary:
    """Summarize draws where they lie: each device computes its own columns, and no draw is gathered.

    ``position`` has leaves [chains, draws, ...]; ``stats`` are arrays [chains, draws] by name,
    ``log_density`` among them. ``max_tree_depth``, ``judges_energy`` and ``thin`` (see
    `advice.on_transitions`) and ``note`` are the kernel's and the run's; ``moves`` are the chains that
    warm-up has moved; ``labels`` are `Draws.groups`; ``losses`` are warnings of the dtypes on disk. The
    other arguments are those of `Draws.summary`.
    """
    if not isinstance(max_rows, Integral) or isinstance(max_rows, bool) or max_rows < 0:
        raise ValueError(f"max_rows: expected an integer of at least 0, got {max_rows!r}")
    check_draws(position)
    num_chains, num_draws = np.shape(stats["log_density"])
    named = named_leaves(position)
    own_name = free_name("log_density", named)
    compute = functools.partial(_statistics, num_superchains=num_superchains)
    with jax.numpy_dtype_promotion("standard"):  # statistics rely on it; a user's may be strict
        found = by_name(compute, named | {own_name: stats["log_density"]})
    limits = {
        "mean": 0.0,
        "rhat_beyond_noise" if num_superchains is None else "nested_rhat": advice.MOST_RHAT,
        **dict.fromkeys(("ess_bulk", "ess_tail"), advice.least_ess(num_chains)),
        "spacings": advice.LEAST_SPACINGS,
    }
    leaves = [_Leaf.of(name, found[name], limits, labels.get(name)) for name in (*named, own_name)]
    names = None if names is None else (names,) if isinstance(names, str) else tuple(names)
    if groups is None:
        by_leaf = {leaf.name: leaf.rows for leaf in leaves[:-1]}
        if names is None:
            rows = sum(by_leaf.values(), [])
        elif names == (own_name,):  # its line is there in any case
            rows = []
        else:
            rows = rows_of_names([name for name in names if name != own_name], by_leaf, labels, found)
        rows = sorted(rows, key=lambda row: row.order)
        rows, num_left_out = rows[:max_rows], sum(row.size for row in rows[max_rows:])
    elif names is None:
        rows, num_left_out = rows_of_groups(groups, labels, found, max_rows)
    else:
        raise ValueError("summary: expected names= or groups=, got both. Call it once for each.")
    log_density = leaves[-1].rows[0]
    num_excused = 0  # numbers whose R-hat exceeds its limit only by the noise of short chains
    if num_superchains is None:
        over, beyond = (
            sum(leaf.num_beyond(name, advice.MOST_RHAT) for leaf in leaves)
            for name in ("rhat", "rhat_beyond_noise")
        )
        num_excused = over - beyond
    on_numbers, on_chance = _on_numbers(leaves, limits, num_chains, num_draws)
    warnings = [
        *losses,
        *advice.on_number_of_draws(num_chains, num_draws),
        *advice.on_transitions(stats, max_tree_depth, judges_energy, thin),
        *on_numbers,
    ]
    of_energy = advice.on_unknown_energy(stats, thin) if judges_energy else ""
    rhat_before_moves = None
    if moves:
        before = np.array(stats["log_density"])
        for move in moves:
            before[move.chain] = move.from_log_density
        rhat_before_moves = float(rhat(before))
        warnings.append(advice.on_moves(moves, num_chains, rhat_before_moves))
    if num_draws > 1 and log_density.values["sd"] == 0:
        warnings.append(advice.ALL_EQUAL)
    treedef = jax.tree.structure(position)
    trees = {key: treedef.unflatten([found[name][key] for name in named]) for key in log_density.values}
    return Summary(
        **{"nested_rhat": None} | trees,
        log_density=log_density.values,
        warnings=warnings,
        notes=[x for x in (note, advice.on_noise(num_excused), on_chance, of_energy) if x],
        rows=[*rows, log_density],
        num_left_out=num_left_out,
        names=names,
        groups=groups,
        num_chains=num_chains,
        num_draws=num_draws,
        rhat_before_moves=rhat_before_moves,
        _leaves=leaves[:-1],
    )


def _statistics(draws: PyTree, num_superchains: int | None) -> dict[str, PyTree]:
    """Return the trees of all statistics by name."""
    found = statistics(draws)._asdict()
    if num_superchains is None:
        return found
    is_short = jax.tree.leaves(draws)[0].shape[1] < LEAST_DRAWS
    function = nested_rhat if is_short else rank_nested_rhat
    return {**found, "nested_rhat": function(draws, num_superchains)}


def _worst_first(leaves: list[_Leaf], statistic: str) -> list[Worst]:
    """Return numbers, the worst first, NaN last; of each large leaf only its worst one."""

    def order(worst: Worst) -> tuple[bool, float]:
        return math.isnan(worst.value), -SIGNS[statistic] * worst.value

    return sorted((worst for leaf in leaves for worst in leaf.worst(statistic)), key=order)


def _on_numbers(
    leaves: list[_Leaf], limits: dict[str, float], num_chains: int, num_draws: int
) -> tuple[list[str], str]:
    """Warn of numbers that are beyond the limits; return a note instead if R-hat is so by chance."""
    size, expected = sum(leaf.size for leaf in leaves), sum(leaf.by_chance for leaf in leaves)
    least_p_value = min(leaf.least_p_value for leaf in leaves)
    found, note = [], ""
    for statistic, limit in limits.items():
        # The log density, the last one, is rounded only when it is recorded: kernels use its summands.
        judged = leaves[:-1] if statistic == "spacings" else leaves
        count = sum(leaf.num_beyond(statistic, limit) for leaf in judged)
        worst = [x for x in _worst_first(judged, statistic) if is_beyond(x.value, statistic, limit)]
        if not count:
            continue
        if statistic == "mean":
            found.append(advice.on_not_finite(count, sorted(worst)))
        elif statistic == "spacings":
            found.append(advice.on_spacing(count, worst))
        elif statistic.startswith("ess"):
            found.append(advice.on_ess(statistic.removeprefix("ess_"), limit, count, size, worst))
        elif statistic == "rhat_beyond_noise" and is_chance(count, expected, least_p_value, size):
            note = advice.on_chance(count, size, worst, expected)
        else:
            found.append(advice.on_rhat(statistic, count, size, worst, num_chains, num_draws))
    return found, note


def _extreme_of(
    leaf: str, found: dict[str, Any], statistic: str, limit: float, groups: GroupLabels | None
) -> Extreme:
    """Find the worst number of a leaf by a statistic, where its statistics [...] lie."""
    place, count, of_worst = _extreme(found, statistic, limit)
    index = np.unravel_index(int(place), np.shape(found[statistic]))
    values = {key: float(x) for key, x in of_worst.items()}
    return Extreme(element(leaf, tuple(map(int, index)), groups), values, int(count))


@jax.jit
def _chance(found: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return how many numbers exceed the limit by chance, and the least p-value of those that do."""
    is_over = found["rhat_beyond_noise"] > advice.MOST_RHAT
    return jnp.sum(found["rhat_by_chance"]), jnp.min(jnp.where(is_over, found["rhat_p_value"], 1))


@functools.partial(jax.jit, static_argnames="name")
def _extreme(found: dict[str, jax.Array], name: str, limit: jax.Array):
    badness = _badness(found, name)
    num_beyond = jnp.sum(is_beyond(found[name], name, limit))
    place = jnp.zeros(badness.shape, int)
    for axis, length in enumerate(badness.shape):
        place = place * length + jax.lax.broadcasted_iota(place.dtype, badness.shape, axis)
    worst = jnp.min(jnp.where(badness == badness.max(), place, badness.size))
    # A sum over all, not an index: only scalars leave the devices.
    of_worst = {key: jnp.sum(jnp.where(place == worst, x, 0)) for key, x in found.items()}
    return worst, num_beyond, of_worst


def is_beyond(value: Any, name: str, limit: Any) -> Any:
    """Tell whether the value of a statistic, a number or an array, is beyond its limit."""
    if name == "mean":
        return (abs(value) < float("inf")) ^ True  # NaN is not finite either
    return SIGNS[name] * value > SIGNS[name] * limit


def _badness(found: dict[str, jax.Array], name: str) -> jax.Array:
    """Return a statistic such that the worst is largest: NaN, unless all draws are equal."""
    if name == "mean":
        return jnp.where(is_beyond(found[name], name, 0), jnp.inf, -jnp.inf)
    without = jnp.where(found["sd"] == 0, -jnp.inf, jnp.inf)
    value = SIGNS[name] * jnp.asarray(found[name])
    return jnp.where(jnp.isnan(value), without, value)
