"""Every mutation can be applied: `tests.mutations` finds its function, its text and its tests."""

import pytest
from mutations import MUTATIONS, defect, places


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_can_be_applied(mutation):
    assert defect(mutation) is None


def test_names_are_unique():
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)


def test_a_mutation_of_a_function_that_is_gone_is_not_found(tmp_path):
    (tmp_path / "module.py").write_text("class A:\n    def f(self):\n        return 1 + 1\n")
    mutation = MUTATIONS[0]._replace(function="A.f", old="1")
    assert len(places(tmp_path, mutation)) == 2  # in several places: not found either
    assert len(places(tmp_path, mutation._replace(old="1 + 1"))) == 1
    assert places(tmp_path, mutation._replace(function="A.g")) == []
    assert (defect(mutation) or "").startswith("NOT FOUND")
    assert "test_gone.py" in (defect(MUTATIONS[0]._replace(tests="gone")) or "")
