"""Models of the benchmarks of effective sample sizes and of first calls, by name."""

import argparse
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import data, posteriordb
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
    """End with an error unless models and contenders are known."""
    for given, known in ((options.models, models), (options.contenders or (), contenders)):
        for name in given:
            if name not in known:
                parser.error(f"{name!r} is not one of {', '.join(known)}")


@contextmanager
def folder_of(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the folder of the data of ``options.models``, and where they came from.

    A model of posteriordb has no stand-in: where its data are not available, it is left out of
    ``options.models``, and a line says so. The program ends if no model is left.
    """
    options.models = tuple(name for name in options.models if _is_available(name, options.data_dir))
    if not options.models:
        raise SystemExit("--models: the data of none of them are available")
    needed = {MODELS[name].data_set for name in options.models}
    with data.folder_of(needed & {data.MNIST}, options.data_dir) as (folder, sources):
        if options.data_dir is None and posteriordb.FOLDER in needed:
            Path(folder, posteriordb.FOLDER).symlink_to(posteriordb.cache_folder(posteriordb.FOLDER))
        yield folder, sources


def _is_available(name: str, data_dir: str | None) -> bool:
    if MODELS[name].data_set != posteriordb.FOLDER:
        return True
    try:
        MODELS[name].load(data_dir)
    except posteriordb.DownloadError as error:
        posteriordb.announce(
            f"{name} is left out: posteriordb is not available ({error}). --data-dir or "
            f"{posteriordb.DATA_ENV} can name a folder that holds its files."
        )
        return False
    except (OSError, ValueError) as error:
        raise SystemExit(f"--data-dir or {posteriordb.DATA_ENV}: {error}") from error
    return True


def names(text: str) -> tuple[str, ...]:
    """Read names with commas between them."""
    return tuple(text.split(","))
