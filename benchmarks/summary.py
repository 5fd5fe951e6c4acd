"""What rounds say: rates with their spread, and ratios taken round by round."""

from statistics import median


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, the least and the greatest."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def summarise(records: list[dict], ours: str = "ours", floor: str = "roofline") -> None:
    """Add rates, ratios to ours and shares of the floor to the records of one configuration."""
    rates = {record["contender"]: _rates(record) for record in records}
    for record in records:
        own = rates[record["contender"]]
        if not own:
            continue
        record["per_s"] = spread(list(own.values()))
        for key in record["rounds"][0].get("extra", {}):
            record[key] = spread([entry["extra"][key] for entry in record["rounds"]])
        if record["contender"] != ours:
            _add(record, "ours_over_this", _ratios(rates.get(ours, {}), own))
        if record["contender"] != floor:
            _add(record, "share_of_roofline", _ratios(own, rates.get(floor, {})))


def _rates(record: dict) -> dict[int, float]:
    return {entry["round"]: entry["per_s"] for entry in record["rounds"]}


def _ratios(above: dict[int, float], below: dict[int, float]) -> list[float]:
    return [above[number] / below[number] for number in sorted(above.keys() & below.keys())]


def _add(record: dict, name: str, ratios: list[float]) -> None:
    if ratios:
        record[name] = spread(ratios)
