"""Models of the benchmark of effective sample sizes, by name."""

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
