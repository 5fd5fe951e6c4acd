"""Which devices take part in a collective, and which mesh axes that is."""

import itertools
import math
import re

import numpy as np

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,\s]*\},?\s*)*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^ ]*)\))? \{([^}]*)\}")
_IOTA_IDS = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'?([^'=,:]+)'?=(\d+)")
_AXIS_REF = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)")
_PAIRS = re.compile(r'source_target_pairs="?\{((?:\{\d+,\s*\d+\},?\s*)*)\}')


def read_groups(attributes: str, num_devices: int) -> np.ndarray | None:
    """Read the groups of devices of a collective, shape [groups, devices of a group].

    Devices are numbered as the mesh lays them out. The three forms of XLA are read: groups listed,
    a transposed range, and axes of a mesh. Groups of different sizes, and what has another form,
    are None.
    """
    if match := _IOTA.search(attributes):
        groups, size, dims, order = match.groups()
        return _iota(dims, order).reshape(int(groups), int(size))
    if match := _MESH.search(attributes):
        return _mesh_groups(*match.groups())
    if match := _LISTED.search(attributes):
        listed = [_ints(group) for group in re.findall(r"\{([\d,\s]*)\}", match.group(1))]
        if not listed:  # no group given: all devices are one
            return np.arange(num_devices).reshape(1, -1)
        return np.array(listed) if len({len(group) for group in listed}) == 1 else None
    return None


def read_pairs(attributes: str) -> np.ndarray | None:
    """Read who sends to whom, shape [pairs, 2]; None where there are no pairs."""
    match = _PAIRS.search(attributes)
    pairs = re.findall(r"(\d+),\s*(\d+)", match.group(1)) if match else []
    return np.array([[int(a), int(b)] for a, b in pairs]) if pairs else None


def axes_of_groups(groups: np.ndarray, mesh: dict[str, int]) -> tuple[str, ...]:
    """Name the mesh axes whose devices make up each group; () if no axes give these groups."""
    if groups.size != math.prod(mesh.values()):
        return ()
    ids = np.arange(groups.size).reshape(tuple(mesh.values()))
    for count in range(1, len(mesh) + 1):
        for names in itertools.combinations(mesh, count):
            if math.prod(mesh[n] for n in names) == groups.shape[1]:
                over = _over(ids, [i for i, name in enumerate(mesh) if name in names])
                if np.array_equal(_canonical(over), _canonical(groups)):
                    return tuple(n for n in names if mesh[n] > 1) or names
    return ()


def axes_of_pairs(pairs: np.ndarray, mesh: dict[str, int]) -> tuple[str, ...]:
    """Name the mesh axes along which any sender and its receiver differ."""
    if pairs.size and pairs.max() >= math.prod(mesh.values()):
        return ()
    sizes = tuple(mesh.values())
    source, target = (np.stack(np.unravel_index(pairs[:, i], sizes)) for i in (0, 1))
    differs = (source != target).any(axis=1)
    return tuple(name for name, moved in zip(mesh, differs, strict=True) if moved)


def _over(ids: np.ndarray, inside: list[int]) -> np.ndarray:
    """Return the groups [groups, devices of a group] over some axes of an array of devices."""
    outside = [i for i in range(ids.ndim) if i not in inside]
    return ids.transpose(outside + inside).reshape(-1, math.prod(ids.shape[i] for i in inside))


def _canonical(groups: np.ndarray) -> np.ndarray:
    inside = np.sort(groups, axis=1)
    return inside[np.argsort(inside[:, 0])]


def _mesh_groups(axes: str, device_ids: str | None, refs: str) -> np.ndarray | None:
    """Read groups given as axes of a mesh, or as parts ``axis:(devices before)size`` of them."""
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    total = math.prod(sizes.values())
    text = device_ids or f"[{total}]"  # in the order of the mesh: listed, or as a transposed range
    iota = _IOTA_IDS.fullmatch(text)
    ids = _iota(*iota.groups()).ravel() if iota else np.array(_ints(text))
    parts = [(name, int(pre or 0), int(size or 0)) for name, pre, size in _AXIS_REF.findall(refs)]
    if ids.size != total or any(name not in sizes for name, _, _ in parts):
        return None
    dims: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        for pre, length in _cut(size, [(p, s) for n, p, s in parts if n == name]):
            place[name, pre] = len(dims)
            dims.append(length)
    return _over(ids.reshape(dims), [place[name, pre or 1] for name, pre, _ in parts])


def _iota(dims: str, order: str | None) -> np.ndarray:
    ids = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return ids.transpose(_ints(order)) if order else ids


def _cut(size: int, parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cut an axis at its named parts: pairs (devices before, length) that multiply to its size."""
    cuts = sorted({1, size, *(p for p, s in parts if s), *(p * s for p, s in parts if s)})
    pieces = [(low, high // low) for low, high in itertools.pairwise(cuts)]
    return pieces or [(1, size)]


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(i) for i in text.split(",") if i.strip())
