"""Models of the benchmarks of effective sample sizes and of first calls, by name."""

import argparse
from collections.abc import Collection

from benchmarks.ess_models import hierarchical, regression, sequences
from benchmarks.ess_models.model import Model

MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        hierarchical.EIGHT_SCHOOLS,
        sequences.ARK,
        sequences.GP_REGRESSION,
        regression.GERMAN_CREDIT,
        hierarchical.ITEM_RESPONSE,
        sequences.STOCHASTIC_VOLATILITY,
        hierarchical.GROUPS,
        regression.MNIST_SMALL,
        regression.MNIST,
    )
}


def check_options(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    models: Collection[str],
    contenders: Collection[str],
) -> None:
    """End with an error unless models and contenders are known, and have the data that they need."""
    for given, known in ((options.models, models), (options.contenders or (), contenders)):
        for name in given:
            if name not in known:
                parser.error(f"{name!r} is not one of {', '.join(known)}")
    if not options.data_dir and any(MODELS[name].needs_data_dir for name in options.models):
        parser.error("--data-dir or GSPMD_MCMC_DATA must name the folder of mnist/ and posteriordb/")


def names(text: str) -> tuple[str, ...]:
    """Read names with commas between them."""
    return tuple(text.split(","))
