"""Fixed point: float64 matrices as int16 transforms in units of 2**-14, and inverses of the rounded.

Twin file, byte-identical in both packages: NumPy only.
"""

import numpy as np
import numpy.typing as npt

from ..core import cache_format as fmt
from ..core.errors import ConfigError

INVERSE_TOLERANCE = 1e-3  # the largest entry of |T times inverse - I|
UNIT = 2.0**-fmt.TRANSFORM_BITS


def to_fixed_point(matrix: np.ndarray) -> tuple[np.ndarray, float]:
    """int16 [D, D] in units of 2**-14 and the positive factor c: the largest rounding of c·matrix that fits.

    Fits: every column of the *rounded* matrix has integer norm <= 2**14. Rounding can lift a column whose
    norm was exactly 1 (eight entries of 5792.6 become 5793), so the factor shrinks until all fit. One
    factor for a whole matrix changes nothing: the row's scale absorbs it, and so does the inverse. A matrix
    that comes from fixed point goes back unchanged.
    """
    matrix = np.asarray(matrix, np.float64)
    norm = np.sqrt((matrix**2).sum(axis=0).max())
    if not np.isfinite(norm) or norm <= 0:
        raise ConfigError(f"transform has largest column norm {norm}, expected a finite positive one")
    units = matrix * fmt.TRANSFORM_MAX
    if 0.5 < norm <= 1.0 and np.array_equal(units, np.rint(units)):
        return units.astype(np.int16), 1.0
    factor = 1.0 / norm
    limit = fmt.TRANSFORM_MAX**2
    while True:
        rounded = np.rint(matrix * (factor * fmt.TRANSFORM_MAX)).astype(np.int64)
        largest = int((rounded**2).sum(axis=0).max())
        if largest <= limit:
            return rounded.astype(np.int16), factor
        factor *= np.sqrt(limit / largest)


def from_fixed_point(transform: npt.ArrayLike) -> np.ndarray:
    """The float64 matrix that an int16 transform stands for."""
    return np.asarray(transform).astype(np.float64) * UNIT


def invert_fixed_point(transform: np.ndarray) -> np.ndarray:
    """The float64 inverse of the rounded transform, int16 [D, D] -> [D, D]; ConfigError if it has none."""
    matrix = from_fixed_point(transform)
    try:
        inverse = np.linalg.inv(matrix)
    except np.linalg.LinAlgError:
        raise ConfigError("transform is singular once rounded to 2**-14") from None
    error = np.abs(matrix @ inverse.astype(np.float32) - np.eye(len(matrix))).max()
    if not error <= INVERSE_TOLERANCE:
        raise ConfigError(f"transform is too ill-conditioned for fixed point: inverse off by {error:.3g}")
    return inverse
