"""scikit-learn's own checks of estimators, all of them."""

import pytest

pytest.importorskip("sklearn", minversion="1.6")

from sklearn.utils.estimator_checks import parametrize_with_checks

from ortholand_lab.estimators import LandingCCA, LandingICA, LandingPCA

CHECKS = parametrize_with_checks(
    [
        LandingICA(),
        LandingICA(n_components=1, whiten="arbitrary-variance", n_init=2),
        LandingPCA(),
        LandingPCA(n_components=1, whiten=True),
        LandingCCA(),
        LandingCCA(n_components=1, scale=False, ridge=1e-3),
    ]
)
NAMES, PAIRS = CHECKS.args


# A list, which pytest 9 asks for: scikit-learn 1.7 gives a generator.
@pytest.mark.parametrize(NAMES, list(PAIRS), **CHECKS.kwargs)
def test_estimator(estimator, check):
    check(estimator)
