"""The matrices that a rotation is built from, float64 NumPy: Hadamard, eigenbases, balanced bases.

Eigenvectors from accelerators differ in sign and order, so this runs on the CPU and signs are fixed.

Twin file, byte-identical in both packages: NumPy only.
"""

import numpy as np
import numpy.typing as npt

from ..core.errors import ConfigError, ShapeError

BASIS_VERSION = "1"  # of the formulas below; a change of any of them is a new version
KEY_BASES = ("identity", "hadamard", "oscar", "channel_balanced", "balanced", "ordered")
VALUE_BASES = ("identity", "hadamard", "oscar", "oscar_exact", "ordered")


# Bases, float64 [D, D].


def hadamard_matrix(head_dim: int) -> np.ndarray:
    """The orthonormal Hadamard matrix, float64 [D, D]: blocks of the largest power of two that divides D."""
    block = head_dim & -head_dim
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(head_dim // block), matrix) / np.sqrt(block)


def bit_reversal(size: int) -> np.ndarray:
    """The bit-reversal permutation, int64 [size]: the next power of two's, numbers >= size left out."""
    bits = max(size - 1, 0).bit_length()
    numbers = np.arange(1 << bits)
    reverse = sum((((numbers >> bit) & 1) << (bits - 1 - bit) for bit in range(bits)), np.zeros_like(numbers))
    return reverse[reverse < size]


def eigenbasis(covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues float64 [D], ascending, and eigenvectors float64 [D, D] (columns) of a symmetric matrix.

    Canonical signs: in each column the first entry within 1e-9 of the largest magnitude is positive. Within
    an eigenspace of more than one dimension the basis stays LAPACK's choice.
    """
    matrix = _symmetric(covariance)
    values, vectors = np.linalg.eigh(matrix)
    magnitude = np.abs(vectors)
    lead = np.argmax(magnitude >= magnitude.max(axis=0) * (1 - 1e-9), axis=0)
    return values, vectors * np.where(vectors[lead, np.arange(len(lead))] < 0, -1.0, 1.0)


def oscar_basis(covariance: np.ndarray) -> np.ndarray:
    """The orthogonal R = U·H·P of the paper, float64 [D, D], from a query or value covariance [D, D].

    U: eigenvectors by ascending eigenvalue, H: Hadamard, P: I[:, perm] with perm[bitrev(i)] = s[i], where s
    sorts the eigenvalues in descending order. P cannot change the error of a row with a single scale.
    """
    values, vectors = eigenbasis(covariance)
    permutation = np.empty(len(values), np.int64)
    permutation[bit_reversal(len(values))] = np.argsort(-values, kind="stable")
    return (vectors @ hadamard_matrix(len(values)))[:, permutation]


def channel_balanced_basis(
    query_covariance: np.ndarray, key_covariance: np.ndarray, damping: float
) -> np.ndarray:
    """diag((C_Q,ii / C_K,ii)**0.25)·H, float64 [D, D]: each channel has equal energy in queries and keys."""
    query, key = damped_covariance(query_covariance, damping), damped_covariance(key_covariance, damping)
    return ((np.diag(query) / np.diag(key)) ** 0.25)[:, None] * hadamard_matrix(len(key))


def balanced_basis(query_covariance: np.ndarray, key_covariance: np.ndarray, damping: float) -> np.ndarray:
    """C_Q**0.5·U·S**-0.5·H, float64 [D, D], with U S Vt = svd(C_Q**0.5 C_K**0.5).

    Queries and keys then share one diagonal covariance (S) before the Hadamard mix.
    """
    root, left, singular = shared_diagonal(query_covariance, key_covariance, damping, damping)
    return (root @ left / np.sqrt(singular)) @ hadamard_matrix(len(singular))


def shared_diagonal(
    query_covariance: np.ndarray, key_covariance: np.ndarray, query_damping: float, key_damping: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """C_Q**0.5 and U float64 [D, D], S [D] with U S Vt = svd(C_Q**0.5 C_K**0.5).

    C_Q**0.5·U·S**-t makes both covariances diagonal: S**(2-2t) of keys, S**2t of queries.
    """
    query_root = _square_root(damped_covariance(query_covariance, query_damping))
    key_root = _square_root(damped_covariance(key_covariance, key_damping))
    left, singular, _ = np.linalg.svd(query_root @ key_root)
    # The sign of a singular vector flips one row of H: canonical for the same reason as in eigenbasis.
    lead = np.argmax(np.abs(left) >= np.abs(left).max(axis=0) * (1 - 1e-9), axis=0)
    return query_root, left * np.where(left[lead, np.arange(len(lead))] < 0, -1.0, 1.0), singular


def orthogonality_defect(matrix: npt.ArrayLike) -> float:
    """The largest entry of |TᵀT/c − I| over matrices [..., D, D], c the mean squared column norm."""
    matrices = np.asarray(matrix, np.float64)
    gram = matrices.swapaxes(-1, -2) @ matrices
    scale = np.trace(gram, axis1=-2, axis2=-1)[..., None, None] / gram.shape[-1]
    return float(np.abs(gram / scale - np.eye(gram.shape[-1])).max())


def condition_number(matrix: npt.ArrayLike) -> float:
    """The largest ratio of extreme singular values over all matrices [..., D, D]."""
    return float(np.max(np.linalg.cond(np.asarray(matrix, np.float64))))


def _symmetric(covariance: np.ndarray) -> np.ndarray:
    matrix = np.asarray(covariance, np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ShapeError(f"covariance has shape {matrix.shape}, expected [D, D]")
    if not np.isfinite(matrix).all():
        raise ConfigError("covariance has non-finite entries")
    return (matrix + matrix.T) / 2


def damped_covariance(covariance: np.ndarray, damping: float) -> np.ndarray:
    """A covariance [D, D] plus `damping` times its mean variance; the identity for one without energy."""
    matrix = _symmetric(covariance)
    energy = np.trace(matrix) / len(matrix)
    if energy <= 0:  # a head that was never active
        return np.eye(len(matrix))
    if np.any(np.diag(matrix) + damping * energy <= 0):
        raise ConfigError(f"damping = {damping!r} leaves a channel without energy, allowed: > 0")
    return matrix + damping * energy * np.eye(len(matrix))


def _square_root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    if values[0] <= 0:
        raise ConfigError("covariance is singular after damping; allowed: a damping > 0")
    return (vectors * np.sqrt(values)) @ vectors.T
