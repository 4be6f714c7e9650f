"""Layers that keep norms, and what they certify: networks with a proved Lipschitz constant.

The weights of these layers are plain parameters, marked as orthogonal (:mod:`ortholand.marks`), so
``ol.LandingAdam(model.parameters())`` trains them, and no forward pass orthogonalises any.

- :class:`OrthogonalConv2d`: convolutions that are isometries, or transposes of isometries.
- :class:`OrthogonalLinear`, :class:`UnitRowLinear`, :class:`MaxMin`: what goes around them.
- :func:`lipschitz_bound`, :func:`certified_radii`, :func:`certified_accuracy`: certificates.
- :func:`export`: the same network in torch's own layers.
"""

from ortholand.nn.certificates import certified_accuracy, certified_radii, lipschitz_bound
from ortholand.nn.convolution import OrthogonalConv2d
from ortholand.nn.exporting import export
from ortholand.nn.layers import MaxMin, OrthogonalLinear, UnitRowLinear

__all__ = [
    "MaxMin",
    "OrthogonalConv2d",
    "OrthogonalLinear",
    "UnitRowLinear",
    "certified_accuracy",
    "certified_radii",
    "export",
    "lipschitz_bound",
]
