"""Bases and feedback for sequential rounding: blocks of channels that are coded one after the other.

Each block corrects for the errors of those before it, so the basis is made for that order: keys white,
queries diagonal, and the energies of the queries mixed so that every block keeps the same conditional energy
(geometric mean decomposition: Jiang, Hager and Li, 2005). Covariances of short texts are spread to where
longer ones stand: RoPE turns a row by its position, and what that does to a covariance has a closed form.

Twin file, byte-identical in both packages: NumPy only.
"""

import numpy as np

from ..core import cache_format as fmt
from ..core.errors import ConfigError
from .bases import damped_covariance, hadamard_matrix, shared_diagonal

MOST_STEPS = 4  # as good as one channel at a time; two blocks keep two thirds of the gain
KEY_DAMPING = 0.3  # of the keys' covariance, relative to the damping of the queries'
SPREAD_SHARE = 0.5  # of the rows that stand anywhere up to the longest context; the others stay as measured
_OFFSETS = 4096  # of the mean over positions


def rounding_steps(head_dim: int) -> int:
    """Blocks of channels in which rows of `head_dim` channels are coded; ConfigError if there is only one."""
    steps = min(MOST_STEPS, head_dim // fmt.FEEDBACK_BLOCK_MIN)
    if steps < 2:
        raise ConfigError(
            f"head_dim = {head_dim} is one block of {fmt.FEEDBACK_BLOCK_MIN} channels: rounding 'sequential' "
            f"needs two, allowed: 'nearest'"
        )
    return steps


def ordered_basis(query: np.ndarray, key: np.ndarray, damping: float, key_damping: float) -> np.ndarray:
    """The basis float64 [D, D] of blocks coded in their order, from covariances [D, D] of queries and rows.

    Rows become white and queries diag(energies); every group of `rounding_steps` energies, one to a block, is
    mixed to equal conditional energies; a Hadamard matrix mixes each block. Dampings are relative to the mean
    variance, `damping` to that of queries and of the energies.
    """
    steps = rounding_steps(len(key))
    root, left, singular = shared_diagonal(query, key, damping, key_damping)
    whitening = root @ left / singular
    energy = singular**2
    energy = energy + damping * energy.mean()
    block = len(key) // steps
    basis = np.empty_like(whitening)
    for place, group in enumerate(_even_groups(energy, steps)):
        columns = [number * block + place for number in range(steps)]
        basis[:, columns] = whitening[:, group] @ geometric_mean_mix(energy[group])
    return basis @ np.kron(np.eye(steps), hadamard_matrix(block))


def fit_feedback(inverse: np.ndarray, query: np.ndarray, damping: float) -> tuple[np.ndarray, int]:
    """Feedback int8 [D, D] (source by target) and its shift, for the rounded transform's inverse [D, D].

    An error u of a block costs least where the later channels are moved by u·N, N the block's regression on
    them under the queries' covariance [D, D]. The shift is the largest for which N fits int8.
    """
    metric = damped_covariance(inverse @ query @ inverse.T, damping)
    head_dim = len(metric)
    block = head_dim // rounding_steps(head_dim)
    feedback = np.zeros((head_dim, head_dim))
    for end in range(block, head_dim, block):
        here = slice(end - block, end)
        feedback[here, end:] = np.linalg.solve(metric[end:, end:], metric[end:, here]).T
    for shift in range(fmt.FEEDBACK_MAX_SHIFT, -1, -1):
        rounded = np.rint(feedback * 2.0**shift)
        if np.abs(rounded).max() <= fmt.FEEDBACK_LIMIT:
            return rounded.astype(np.int8), shift
    raise ConfigError(
        f"feedback of {np.abs(feedback).max():.3g} does not fit int8: damping = {damping!r}, allowed: more"
    )


def spread_covariance(
    covariance: np.ndarray, frequencies: np.ndarray, interleaved: bool, context: int, reach: int
) -> np.ndarray:
    """A covariance [D, D] of RoPE'd rows as if half of the texts stood anywhere below `reach`.

    frequencies: radians per position of the pairs that turn, [R/2], channel i with i + R/2 or, if
    interleaved, 2i with 2i + 1. Offsets are uniform in 0 ... reach - context; nothing changes without any.
    """
    if reach <= context or not len(frequencies):
        return covariance
    head_dim, width = len(covariance), 2 * len(frequencies)
    turning = np.arange(width).reshape(-1, 2).T if interleaved else np.arange(width).reshape(2, -1)
    low, high = np.concatenate([turning, np.arange(width, head_dim).reshape(-1, 2).T], axis=1)
    speed = np.concatenate([frequencies, np.zeros((head_dim - width) // 2)])
    ll, lh, hl, hh = (covariance[np.ix_(rows, columns)] for rows in (low, high) for columns in (low, high))
    # A pair is one complex number z; a turn multiplies it. Means over offsets of z·conj(z) and of z·z:
    turns = np.exp(1j * np.linspace(0, reach - context, _OFFSETS)[:, None] * speed)  # [offsets, D/2]
    straight = ((ll + hh) + 1j * (hl - lh)) * (turns.T @ turns.conj() / _OFFSETS)
    twisted = ((ll - hh) + 1j * (hl + lh)) * (turns.T @ turns / _OFFSETS)
    total, difference = straight + twisted, straight - twisted
    spread = np.empty_like(covariance)
    spread[np.ix_(low, low)], spread[np.ix_(low, high)] = total.real / 2, -difference.imag / 2
    spread[np.ix_(high, low)], spread[np.ix_(high, high)] = total.imag / 2, difference.real / 2
    return (1 - SPREAD_SHARE) * covariance + SPREAD_SHARE * spread


def geometric_mean_mix(energy: np.ndarray) -> np.ndarray:
    """Orthogonal [n, n] whose columns, coded in order with full feedback, keep equal conditional energies."""
    size = len(energy)
    factor, mix = np.diag(np.sqrt(energy)), np.eye(size)  # factor stays upper triangular
    mean = np.exp(np.log(energy).mean() / 2)
    for k in range(size - 1):
        above = factor[k, k] >= mean
        others = [j for j in range(k + 1, size) if (factor[j, j] <= mean) == above]
        if not others:
            continue
        order = np.arange(size)
        order[[k + 1, others[0]]] = order[[others[0], k + 1]]
        factor, mix = factor[np.ix_(order, order)], mix[:, order]
        first, second = factor[k, k], factor[k + 1, k + 1]
        if abs(first - second) < 1e-12 * mean:
            continue
        cosine = np.sqrt(np.clip((mean**2 - second**2) / (first**2 - second**2), 0, 1))
        sine = np.sqrt(1 - cosine**2)
        turn = np.array([[cosine, -sine], [sine, cosine]])
        factor[:, k : k + 2] = factor[:, k : k + 2] @ turn
        mix[:, k : k + 2] = mix[:, k : k + 2] @ turn
        x, y = factor[k : k + 2, k] / np.hypot(factor[k, k], factor[k + 1, k])
        factor[k : k + 2] = np.array([[x, y], [-y, x]]) @ factor[k : k + 2]
    return mix[:, ::-1]


def _even_groups(energy: np.ndarray, steps: int) -> np.ndarray:
    """Indices int [D / steps, steps]: a group has one of every chunk of sorted energies, products alike."""
    block = len(energy) // steps
    chunks = np.argsort(-energy, kind="stable").reshape(steps, block)
    groups, product = np.empty((block, steps), np.int64), np.zeros(block)
    for number, chunk in enumerate(chunks):
        places = np.argsort(product, kind="stable")  # the largest energy to the smallest product
        groups[places, number] = chunk
        product[places] += np.log(energy[chunk])
    return groups
