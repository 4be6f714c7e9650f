"""Estimators with scikit-learn's interface: independent and principal components, correlation.

``pip install "ortholand[sklearn]"``; ``import ortholand`` imports none of this.
"""

from ortholand.sklearn.cca import LandingCCA
from ortholand.sklearn.ica import LandingICA
from ortholand.sklearn.pca import LandingPCA

__all__ = ["LandingCCA", "LandingICA", "LandingPCA"]
