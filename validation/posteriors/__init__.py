"""The nine posteriors, by their names in posteriordb."""

from validation.posteriors import row_models, sequence_models

MODELS = {
    model.name: model
    for model in (
        row_models.EIGHT_SCHOOLS,
        row_models.ARK,
        sequence_models.GARCH,
        sequence_models.GP_REGRESSION,
        row_models.KIDIQ,
        row_models.NES,
        row_models.MIXTURE,
        sequence_models.HMM,
        row_models.DIAMONDS,
    )
}
