"""Estimators with scikit-learn's interface: independent and principal components, correlation.

For pipelines, grid searches and streams. Closed forms and picard are faster (examples/README.md).
"""

from ortholand_lab.estimators.cca import LandingCCA
from ortholand_lab.estimators.ica import LandingICA
from ortholand_lab.estimators.pca import LandingPCA

__all__ = ["LandingCCA", "LandingICA", "LandingPCA"]
