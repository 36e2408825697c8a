"""Rows, transforms and rotations that all parity tests share: random, hostile, and built to hit every tie.

Everything is NumPy and seeded; bf16 is carried as bits (uint16). A row family is a function of a generator
and a shape (64 P tokens, K heads, D channels); the registry ROW_FAMILIES names them all.
"""

from collections.abc import Callable, Mapping

import numpy as np

from parity_tests.conformance import oracle

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)
HEAD_COUNTS = (1, 2, 8)
MULTIPLIERS = (1, 2, 37, 128, 255, 256, 257, 371, 448, 510, 511)

Shape = tuple[int, int, int]
RowFamily = Callable[[np.random.Generator, Shape], np.ndarray]


# --- rows: bits uint16 [64 P, K, D] ---------------------------------------------------------------


def normal_rows(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Normal rows of very different sizes with an offset per channel, like keys of a model."""
    size = np.exp(rng.normal(0, 1, (shape[0], shape[1], 1)))
    return oracle.to_bfloat16(rng.normal(0, 1, shape) * size + rng.normal(0, 2, (1, *shape[1:])))


def row_magnitudes(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Each row normal, its size drawn over 30 orders of magnitude."""
    size = 10.0 ** rng.uniform(-15, 15, (shape[0], shape[1], 1))
    return oracle.to_bfloat16(rng.normal(0, 1, shape) * size)


def element_magnitudes(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Each element's size drawn over 30 orders of magnitude."""
    return oracle.to_bfloat16(rng.choice([-1.0, 1.0], shape) * 10.0 ** rng.uniform(-15, 15, shape))


def all_bit_patterns(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Any bf16 bits at all: every exponent, NaN, infinities, subnormals, both zeros."""
    return rng.integers(0, 1 << 16, shape).astype(np.uint16)


def large_channel(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """One channel a hundred times larger than the others."""
    rows = rng.normal(0, 1, shape)
    rows[..., rng.integers(shape[-1])] *= 100
    return oracle.to_bfloat16(rows)


def constant_rows(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """The same number everywhere in a row; half of the pages repeat one row 64 times."""
    rows = np.broadcast_to(rng.normal(0, 10, (shape[0], shape[1], 1)), shape).copy()
    for start in range(0, shape[0], 128):
        rows[start : start + 64] = rows[start]
    return oracle.to_bfloat16(rows)


def zero_rows(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Zeros of both signs, with a lone non-zero row on every other page."""
    rows = np.where(rng.random(shape) < 0.5, np.uint16(0), np.uint16(0x8000))
    rows[64 + 5 :: 128] = oracle.to_bfloat16(rng.normal(0, 1, shape))[64 + 5 :: 128]
    return rows


def tiny_rows(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Subnormals and the smallest normals, up to just below 2**-64: all rows are empty."""
    return (rng.integers(0, 63 << 7, shape) | (rng.integers(0, 2, shape) << 15)).astype(np.uint16)


def around_empty(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Rows whose largest entry is just below, at, or just above 2**-64."""
    rows = rng.uniform(-1, 1, shape) * 2.0**-65
    top = rng.choice([1 - 2.0**-8, 1.0, 1 + 2.0**-7], (shape[0], shape[1])) * 2.0**-64
    rows[..., shape[-1] // 3] = top * rng.choice([-1, 1], (shape[0], shape[1]))
    return oracle.to_bfloat16(rows)


def half_range(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """+-60000, the edge of float16."""
    return oracle.to_bfloat16(rng.choice([-6e4, 6e4], shape))


def float_limit(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """+-3e38 and neighbours of 2**64, where the clamp works; some rows stay small."""
    rows = rng.choice([-3e38, 3e38, 2.0**64, -(2.0**64), 2.0**64 * 1.01, 2.0**63 * 1.99], shape)
    rows[rng.random(shape[0]) < 0.3] *= 1e-30
    return oracle.to_bfloat16(rows)


def single_sign(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Rows of one sign, positive or negative, some of a tiny range."""
    sign = rng.choice([-1.0, 1.0], (shape[0], shape[1], 1))
    width = rng.choice([1.0, 1e-2], (shape[0], 1, 1))
    return oracle.to_bfloat16(sign * (1 + width * rng.random(shape)))


def broken_elements(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Normal rows with scattered NaN and infinities, and whole broken rows."""
    rows = normal_rows(rng, shape)
    bad = np.array([0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x7F81], dtype=np.uint16)
    mask = rng.random(shape) < 0.01
    mask[7::64] = True
    return np.where(mask, rng.choice(bad, shape), rows)


def threshold_ties(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """With the identity transform, mean 0 and multiplier 64 (or 256), entries lie exactly on -s, 0 and s.

    A row holds p entries +-a, q entries +-b and zeros. At multiplier M an entry a is a tie if
    (a p + b q) M = 256 D a: p = q = D/2 and b = 7a for M = 64; all entries +-a for M = 256. Row t + 1 is
    minus row t, so that the mean of every page is exactly zero.
    """
    tokens, heads, head_dim = shape
    magnitude = np.full(shape, 1.0)
    magnitude[: tokens // 2, :, head_dim // 2 :] = 7.0
    magnitude[: tokens // 2] = rng.permuted(magnitude[: tokens // 2], axis=-1)
    size = 2.0 ** rng.integers(-30, 30, (tokens // 64, heads, 1)).repeat(64, axis=0)
    rows = magnitude * rng.choice([-1.0, 1.0], shape) * size
    # every fourth pair: two entries +-a replaced by zero and +-2a keep the sum and add an exact zero
    for start in range(0, tokens, 8):
        unit = np.abs(rows[start]).min(axis=-1)
        for head in range(heads):
            first, second = np.flatnonzero(np.abs(rows[start, head]) == unit[head])[:2]
            rows[start, head, first], rows[start, head, second] = 0.0, 2 * unit[head]
    rows[1::2] = -rows[0::2]
    return oracle.to_bfloat16(rows)


def rounding_ties(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """z * 2**(13 - e) lands on k + 0.5 of both signs: rounding is floor(. + 0.5), not to even.

    Rows come in pairs of opposite sign, so that a page's mean key is zero.
    """
    halves = (rng.integers(-63, 64, shape) + 0.5) * 2.0**-13
    halves[..., 0] = rng.choice([-1.0, 1.0], shape[:2])
    halves[1::2] = -halves[0::2]
    return oracle.to_bfloat16(
        halves * 2.0 ** rng.integers(-20, 20, (shape[0] // 64, 1, 1)).repeat(64, axis=0)
    )


def mean_ties(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """The mean key of a page lies exactly between two bf16 numbers, or does only after float32 rounding."""
    tokens, heads, head_dim = shape
    rows = np.empty((tokens // 64, 64, heads, head_dim))
    # half: 32 rows u and 32 rows u + ulp: the mean is u + ulp/2
    unit = 1 + rng.integers(0, 127, (tokens // 64, 1, heads, head_dim)) * 2.0**-7
    rows[:, :32], rows[:, 32:] = unit, unit + 2.0**-7
    # odd channels: 61 ones, two rows 1 + 80/128 and one 2**-20 add up to 2**26 + 2**18 + 1 units, and the
    # last unit is lost in the conversion to float32, which makes it a tie
    rows[..., 1::2] = 1.0
    rows[:, 3:5, :, 1::2] = 1 + 80 / 128
    rows[:, 9, :, 1::2] = 2.0**-20
    sign = rng.choice([-1.0, 1.0], (tokens // 64, 1, heads, head_dim))
    return oracle.to_bfloat16((rows * sign).reshape(shape))


ROW_FAMILIES: dict[str, RowFamily] = {
    family.__name__: family
    for family in (
        normal_rows,
        row_magnitudes,
        element_magnitudes,
        all_bit_patterns,
        large_channel,
        constant_rows,
        zero_rows,
        tiny_rows,
        around_empty,
        half_range,
        float_limit,
        single_sign,
        broken_elements,
        threshold_ties,
        rounding_ties,
        mean_ties,
    )
}


def mixed_rows(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """Every family in turn, page by page: shape [64 P, K, D]."""
    families = list(ROW_FAMILIES.values())
    pages = shape[0] // 64
    share = -(-pages // len(families))
    share += share % 2  # some families alternate between two pages
    blocks = [family(rng, (64 * share, *shape[1:])) for family in families[: -(-pages // share)]]
    return np.concatenate(blocks)[: shape[0]]


# --- transforms: int16 [heads, D, D] in units of 2**-14 -------------------------------------------


def fixed_point(matrix: np.ndarray) -> np.ndarray:
    """The int16 form of a float transform; a column that rounding lifts above norm 1 is truncated instead."""
    scaled = matrix * 2.0**14
    rounded = np.round(scaled)
    too_long = (rounded**2).sum(axis=-2, keepdims=True) > 2.0**28
    return np.where(too_long, np.trunc(scaled), rounded).astype(np.int16)


def identity_transform(rng: np.random.Generator, heads: int, head_dim: int) -> np.ndarray:
    """y = x."""
    return fixed_point(np.broadcast_to(np.eye(head_dim), (heads, head_dim, head_dim)))


def hadamard_matrix(head_dim: int) -> np.ndarray:
    """Normalized Hadamard matrix on the largest power of two dividing head_dim, block-diagonal; float64."""
    block = head_dim & -head_dim
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(head_dim // block), matrix / np.sqrt(block))


def hadamard_transform(rng: np.random.Generator, heads: int, head_dim: int) -> np.ndarray:
    """y = x H."""
    return fixed_point(np.broadcast_to(hadamard_matrix(head_dim), (heads, head_dim, head_dim)))


def orthogonal_transform(rng: np.random.Generator, heads: int, head_dim: int) -> np.ndarray:
    """A random orthogonal matrix per head."""
    return fixed_point(np.linalg.qr(rng.normal(0, 1, (heads, head_dim, head_dim)))[0])


def skewed_transform(rng: np.random.Generator, heads: int, head_dim: int) -> np.ndarray:
    """Not orthogonal: columns of norm 1 with strongly unequal rows, like a channel-balanced basis."""
    matrix = rng.normal(0, 1, (heads, head_dim, head_dim)) * np.exp(rng.normal(0, 1, (heads, head_dim, 1)))
    return fixed_point(matrix / np.linalg.norm(matrix, axis=1, keepdims=True))


def channel_balanced_transform(rng: np.random.Generator, heads: int, head_dim: int) -> np.ndarray:
    """diag(a) H with columns of norm 1: not orthogonal, yet well conditioned, as fitted bases are."""
    weight = np.exp(rng.normal(0, 0.5, (heads, head_dim, 1)))
    matrix = weight * hadamard_matrix(head_dim)
    return fixed_point(matrix / np.linalg.norm(matrix, axis=1, keepdims=True))


def coherent_transform(rng: np.random.Generator, heads: int, head_dim: int) -> np.ndarray:
    """Nearly rank one: all columns almost equal, the largest |Y| and s that columns of norm 1 allow."""
    matrix = 1 + 0.05 * rng.normal(0, 1, (heads, head_dim, head_dim))
    return fixed_point(matrix / np.linalg.norm(matrix, axis=1, keepdims=True))


TRANSFORMS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "identity": identity_transform,
    "hadamard": hadamard_transform,
    "orthogonal": orthogonal_transform,
    "skewed": skewed_transform,
    "channel_balanced": channel_balanced_transform,
    "coherent": coherent_transform,
}


def make_rotation(
    rng: np.random.Generator, heads: int, head_dim: int, basis: str = "orthogonal"
) -> dict[str, np.ndarray]:
    """One layer's rotation arrays by field name (format page, section 1); bf16 fields as bits.

    `heads` is 1 for a shared rotation. The inverses are those of the rounded transforms, in float64.
    """
    key_transform = TRANSFORMS[basis](rng, heads, head_dim)
    value_basis = basis if basis in ("identity", "hadamard") else "orthogonal"
    value_transform = TRANSFORMS[value_basis](rng, heads, head_dim)
    key_inverse = np.linalg.inv(key_transform * 2.0**-14)
    value_inverse = np.linalg.inv(value_transform * 2.0**-14)
    return {
        "key_transform": key_transform,
        "query_transform": np.ascontiguousarray(key_inverse.transpose(0, 2, 1), dtype=np.float32),
        "value_transform": value_transform,
        "output_transform": value_inverse.astype(np.float32),
        "value_mean": oracle.to_bfloat16(rng.normal(0, 0.3, (heads, head_dim))),
        "key_mean": oracle.to_bfloat16(rng.normal(0, 0.3, (heads, head_dim))),
        "key_multiplier": np.full(heads, 371, dtype=np.int32) + np.arange(heads, dtype=np.int32),
        "value_multiplier": np.full(heads, 371, dtype=np.int32) - np.arange(heads, dtype=np.int32),
    }


# --- vectors: the arrays of one conformance file --------------------------------------------------


def make_vectors(
    role: str,
    rows: np.ndarray,
    transform: np.ndarray,
    multiplier: int | np.ndarray,
    mean: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Input vectors as the conformance command reads them; values get a zero mean unless one is given."""
    heads, head_dim = len(transform), rows.shape[-1]
    vectors = {
        "role": np.array(role),
        "rows": rows,
        "transform": transform,
        "multiplier": np.broadcast_to(np.asarray(multiplier, dtype=np.int32), (heads,)).copy(),
    }
    if role == "value":
        vectors["mean"] = np.zeros((heads, head_dim), dtype=np.uint16) if mean is None else mean
    return vectors


def sample_vectors(
    role: str,
    seed: int,
    pages: int,
    heads: int,
    head_dim: int,
    basis: str = "orthogonal",
    shared: bool = False,
    steps: int = 0,
) -> dict[str, np.ndarray]:
    """Mixed hostile rows under one basis, with multipliers that differ per head.

    With `steps` the rounding is sequential in so many blocks, with feedback as large as it may be.
    """
    rng = np.random.default_rng([seed, pages, heads, head_dim])
    matrices = 1 if shared else heads
    multiplier = rng.choice(MULTIPLIERS, matrices).astype(np.int32)
    mean = oracle.to_bfloat16(rng.normal(0, 1, (matrices, head_dim)))
    rows = mixed_rows(rng, (64 * pages, heads, head_dim))
    vectors = make_vectors(role, rows, TRANSFORMS[basis](rng, matrices, head_dim), multiplier, mean)
    if steps:
        vectors["multiplier"] = np.maximum(vectors["multiplier"], 64)
        block = np.arange(head_dim) // (head_dim // steps)
        entries = rng.integers(-127, 128, (matrices, head_dim, head_dim))
        vectors["feedback"] = (entries * (block[:, None] < block[None])).astype(np.int8)
        vectors["feedback_shift"] = rng.integers(0, 8, matrices).astype(np.int32)
        vectors["rounding_steps"] = np.array(steps, np.int32)
    return vectors


def feedback_of(vectors: Mapping[str, np.ndarray]) -> oracle.Feedback | None:
    """The feedback in input vectors, None where rows are rounded to the nearest."""
    if "feedback" not in vectors:
        return None
    steps = int(vectors["rounding_steps"])
    return oracle.Feedback(vectors["feedback"], vectors["feedback_shift"], steps)
