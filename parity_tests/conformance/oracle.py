"""The INT2 page format `oscar-int2/1` in plain NumPy: the third voice beside JAX and Torch.

Written from the format page alone, so that a mistake in a package is not repeated here. It imports neither
package, repeats the format's constants on purpose, and carries bf16 as its bits (uint16). Exact sums are
taken in float64 (every sum stays below 2**53) or int64; the attention is float64.

Shapes: P pages, R rows (tokens), L tokens of one sequence, K key/value heads, N query heads, D head_dim.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

PAGE = 64
SINK_TOKENS = 64
RECENT_TOKENS = 256
TINY = np.float32(2.0**-64)
HUGE = np.float32(2.0**64)


# --- bf16 as bits ---------------------------------------------------------------------------------


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounds float32 to bf16 (nearest even) and returns the bits, uint16; NaN stays NaN."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bf16 bits (uint16)."""
    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)


def power_of_two(exponent: np.ndarray) -> np.ndarray:
    """2**exponent as float32, built from its exponent bits; -126 <= exponent <= 127."""
    return ((np.asarray(exponent, dtype=np.int32) + 127) << 23).view(np.float32)


def exponent_of(magnitude: np.ndarray) -> np.ndarray:
    """Bits 23-30 of float32 minus 127, int32."""
    return ((np.asarray(magnitude, dtype=np.float32).view(np.int32) >> 23) & 0xFF) - 127


# --- section 2: the quantizer ---------------------------------------------------------------------


def finite_rows(rows: np.ndarray) -> np.ndarray:
    """Step 1: bf16 bits to float32 with NaN and infinities as 0 and magnitudes clamped to 2**64."""
    x = from_bfloat16(rows)
    x = np.where(np.isfinite(x), x, np.float32(0))
    return np.clip(x, -HUGE, HUGE)


def page_key_mean(rows: np.ndarray) -> np.ndarray:
    """Step 2 for keys: bits of the mean key [P, K, D] of bf16 pages [P, 64, K, D]."""
    x = finite_rows(rows)
    peak = np.abs(x).max(axis=(1, 3))  # [P, K]
    exponent = np.where(peak < TINY, 0, exponent_of(peak))
    factor = power_of_two(20 - exponent)[:, None, :, None]
    fixed = np.floor(x * factor + np.float32(0.5)).astype(np.int64)
    total = fixed.sum(axis=1).astype(np.float32)  # nearest even, like every astype from int64
    mean = to_bfloat16(total * power_of_two(exponent - 26)[:, :, None])
    return np.where((peak < TINY)[:, :, None], np.uint16(0), mean)


def fixed_rows(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Steps 3 and 4: X int32 [R, K, D] and exponent e int32 [R, K] of centered float32 rows."""
    peak = np.abs(z).max(axis=-1)
    empty = peak < TINY
    exponent = np.where(empty, 0, exponent_of(peak)).astype(np.int32)
    fixed = np.floor(z * power_of_two(13 - exponent)[..., None] + np.float32(0.5)).astype(np.int32)
    return np.where(empty[..., None], 0, fixed), exponent


def rotate_by_limbs(fixed: np.ndarray, transform: np.ndarray) -> np.ndarray:
    """Steps 5 and 6 to the letter, int64: X [R, K, D] and T int16 [K or 1, D, D] give Y [R, K, D]."""
    x, t = fixed.astype(np.int64), np.broadcast_to(transform, (fixed.shape[1], *transform.shape[1:]))
    t = t.astype(np.int64)
    x_hi, t_hi = (x + 128) >> 8, (t + 128) >> 8
    x_lo, t_lo = x - 256 * x_hi, t - 256 * t_hi

    def dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.einsum("rkd,kde->rke", a, b)

    return (dot(x_hi, t_hi) << 8) + (dot(x_hi, t_lo) + dot(x_lo, t_hi)) + (dot(x_lo, t_lo) >> 8)


def rotate(fixed: np.ndarray, transform: np.ndarray) -> np.ndarray:
    """Y = floor(X T / 256), int32: what the limbs of steps 5 and 6 add up to, as one exact product."""
    heads = fixed.shape[1]
    x = fixed.astype(np.float64)
    out = np.empty(fixed.shape, dtype=np.int32)
    for head in range(heads):
        t = transform[head if len(transform) > 1 else 0].astype(np.float64)
        out[:, head] = np.floor((x[:, head] @ t) * 2.0**-8)
    return out


@dataclasses.dataclass(frozen=True)
class Feedback:
    """Sequential rounding of one role: int8 [K or 1, D, D] source by target, int32 [K or 1], blocks."""

    matrix: np.ndarray
    shift: np.ndarray
    steps: int


def sequential_codes(y: np.ndarray, s: np.ndarray, feedback: Feedback) -> np.ndarray:
    """Steps 8a to 8c to the letter, entry by entry: codes uint8 [R, K, D] of Y [R, K, D] and s [R, K]."""
    rows, heads, head_dim = y.shape
    block = head_dim // feedback.steps
    codes = np.empty(y.shape, np.uint8)
    for head in range(heads):
        own = head if len(feedback.matrix) > 1 else 0
        f, shift = feedback.matrix[own].astype(np.int64), int(feedback.shift[own])
        bound = s[:, head].astype(np.int64)
        p = exponent_of(np.maximum(s[:, head], 1).astype(np.float32)) - 5 - shift
        down, up = np.maximum(p, 0).astype(np.int64), np.maximum(-p, 0).astype(np.int64)
        bound = (bound << up) >> down
        w = (y[:, head].astype(np.int64) << up[:, None]) >> down[:, None]
        error = np.zeros((rows, head_dim), np.int64)
        for i in range(head_dim):
            before = i // block * block
            wi = w[:, i] + error[:, :before] @ f[:before, i]
            assert np.abs(wi).max(initial=0) < 2**26, "outside the range that the format page proves"
            code = (wi >= -bound).astype(np.int64) + (wi >= 0) + (wi >= bound)
            rest = wi - (((2 * code - 3) * bound) >> 1)
            error[:, i] = np.clip((rest + ((1 << shift) >> 1)) >> shift, -127, 127)
            codes[:, head, i] = code
    return codes


def quantize_rows(
    rows: np.ndarray,
    transform: np.ndarray,
    multiplier: np.ndarray,
    mean: np.ndarray,
    feedback: Feedback | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Steps 1 to 9: codes uint8 [R, K, D] and scale bits uint16 [R, K] of bf16 rows [R, K, D].

    `mean` holds bf16 bits and broadcasts against the rows; `multiplier` is int32 [K or 1].
    """
    fixed, exponent = fixed_rows(finite_rows(rows) - from_bfloat16(mean))
    y = rotate(fixed, transform)
    magnitude = (np.abs(y) >> 3).sum(axis=-1, dtype=np.int64) // y.shape[-1]
    s = ((magnitude * multiplier.astype(np.int64)) >> 5).astype(np.int32)
    scale = to_bfloat16(s.astype(np.float32) * power_of_two(exponent - 19))
    if feedback is not None:
        return sequential_codes(y, s, feedback), scale
    threshold = s[..., None]
    codes = (y >= -threshold).astype(np.uint8)
    codes += y >= 0
    codes += y >= threshold
    return codes, scale


# --- section 3: pages -----------------------------------------------------------------------------


def _pack(codes: np.ndarray) -> np.ndarray:
    """int32 words of 16 codes each along the last axis; code i of a word sits at bits 2i and 2i + 1."""
    groups = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 16, 16).astype(np.uint32)
    words = np.zeros(groups.shape[:-1], dtype=np.uint32)
    for i in range(16):
        words |= groups[..., i] << np.uint32(2 * i)
    return words.view(np.int32)


def _unpack(words: np.ndarray) -> np.ndarray:
    shifts = np.arange(16, dtype=np.uint32) * 2
    codes = (np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts) & 3
    return codes.astype(np.uint8).reshape(*words.shape[:-1], words.shape[-1] * 16)


def pack_pages(role: str, codes: np.ndarray) -> np.ndarray:
    """Words of codes [P, 64, K, D]: keys [P, K, 64, D/16] by channel, values [P, K, D, 4] by token."""
    order = (0, 2, 1, 3) if role == "key" else (0, 2, 3, 1)
    return _pack(np.ascontiguousarray(codes.transpose(order)))


def unpack_pages(role: str, words: np.ndarray) -> np.ndarray:
    """Codes uint8 [P, 64, K, D] of the words of pages; the inverse of `pack_pages`."""
    return _unpack(words).transpose((0, 2, 1, 3) if role == "key" else (0, 3, 1, 2))


def quantize_pages(
    role: str,
    rows: np.ndarray,
    transform: np.ndarray,
    multiplier: np.ndarray,
    mean: np.ndarray | None = None,
    feedback: Feedback | None = None,
) -> dict[str, np.ndarray]:
    """Pages of bf16 rows [64 P, K, D]: codes [64 P, K, D], scale [64 P, K], words, and page_mean for keys."""
    tokens, heads, head_dim = rows.shape
    pages = tokens // PAGE
    result: dict[str, np.ndarray] = {}
    if role == "key":
        page_mean = page_key_mean(rows.reshape(pages, PAGE, heads, head_dim))
        result["page_mean"] = page_mean
        row_mean = np.repeat(page_mean, PAGE, axis=0)
    else:
        assert mean is not None, "values need their calibrated mean"
        row_mean = mean[None]
    codes, scale = quantize_rows(rows, transform, multiplier, row_mean, feedback)
    result.update(codes=codes, scale=scale)
    result["words"] = pack_pages(role, codes.reshape(pages, PAGE, heads, head_dim))
    return result


def reconstruct_rows(
    codes: np.ndarray, scale: np.ndarray, mean: np.ndarray, inverse: np.ndarray
) -> np.ndarray:
    """x^ = mean + ((code - 1.5) scale) inverse in float64: codes [R, K, D], inverse [K or 1, D, D]."""
    levels = (codes.astype(np.float64) - 1.5) * from_bfloat16(scale).astype(np.float64)[..., None]
    inverse = np.broadcast_to(inverse, (codes.shape[1], *inverse.shape[1:])).astype(np.float64)
    return from_bfloat16(mean).astype(np.float64) + np.einsum("rkd,kde->rke", levels, inverse)


# --- section 4: the cache of one sequence ---------------------------------------------------------


def history_pages(length: int, sink: int = SINK_TOKENS, recent: int = RECENT_TOKENS) -> int:
    """INT2 pages of a sequence of `length` tokens."""
    return max(0, (length - sink - recent) // PAGE)


@dataclasses.dataclass
class SequenceBytes:
    """Everything stored for one sequence, in token order; bf16 as bits.

    key_codes [n, K, 64, D/16], value_codes [n, K, D, 4], key_scale and value_scale [n, K, 64],
    key_page_mean [n, K, D]; sink_* and recent_* are raw rows [tokens, K, D].
    """

    key_codes: np.ndarray
    value_codes: np.ndarray
    key_scale: np.ndarray
    value_scale: np.ndarray
    key_page_mean: np.ndarray
    sink_key: np.ndarray
    sink_value: np.ndarray
    recent_key: np.ndarray
    recent_value: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """Name to array, in a fixed order."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def store_sequence(
    key: np.ndarray,
    value: np.ndarray,
    rotation: Mapping[str, np.ndarray],
    sink: int = SINK_TOKENS,
    recent: int = RECENT_TOKENS,
    feedback: Mapping[str, Feedback] | None = None,
) -> SequenceBytes:
    """The bytes that a cache must hold after `key` and `value` rows (bf16 bits [L, K, D]) were written.

    feedback: of the roles ("key", "value") that are rounded sequentially.
    """
    fed = feedback or {}
    pages = history_pages(len(key), sink, recent)
    end = sink + PAGE * pages
    old_key, old_value = key[sink:end] if pages else key[:0], value[sink:end] if pages else value[:0]
    keys = quantize_pages(
        "key", old_key, rotation["key_transform"], rotation["key_multiplier"], feedback=fed.get("key")
    )
    values = quantize_pages(
        "value",
        old_value,
        rotation["value_transform"],
        rotation["value_multiplier"],
        rotation["value_mean"],
        fed.get("value"),
    )

    def page_scale(scale: np.ndarray) -> np.ndarray:
        return scale.reshape(pages, PAGE, scale.shape[-1]).transpose(0, 2, 1)

    return SequenceBytes(
        key_codes=keys["words"],
        value_codes=values["words"],
        key_scale=page_scale(keys["scale"]),
        value_scale=page_scale(values["scale"]),
        key_page_mean=keys["page_mean"],
        sink_key=key[:sink],
        sink_value=value[:sink],
        recent_key=key[end:],
        recent_value=value[end:],
    )


def read_sequence(stored: SequenceBytes, rotation: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Key and value rows, float64 [L, K, D], as the attention sees them: raw or reconstructed."""

    def history(role: str) -> np.ndarray:
        words = stored.key_codes if role == "key" else stored.value_codes
        scale = stored.key_scale if role == "key" else stored.value_scale
        codes = unpack_pages(role, words)
        codes = codes.reshape(-1, *codes.shape[2:])
        scale = scale.transpose(0, 2, 1).reshape(-1, scale.shape[1])
        if role == "key":  # T_K inverse is the transpose of the query transform
            inverse = rotation["query_transform"].transpose(0, 2, 1)
            return reconstruct_rows(codes, scale, np.repeat(stored.key_page_mean, PAGE, axis=0), inverse)
        return reconstruct_rows(codes, scale, rotation["value_mean"][None], rotation["output_transform"])

    def joined(sink: np.ndarray, role: str, recent: np.ndarray) -> np.ndarray:
        parts = [from_bfloat16(sink).astype(np.float64)]
        if len(stored.key_codes):
            parts.append(history(role))
        return np.concatenate([*parts, from_bfloat16(recent).astype(np.float64)])

    return (
        joined(stored.sink_key, "key", stored.recent_key),
        joined(stored.sink_value, "value", stored.recent_value),
    )


# --- section 5: attention -------------------------------------------------------------------------


def attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    softmax_scale: float,
    first_position: int | None = None,
    sliding_window: int | None = None,
    sink_logits: np.ndarray | None = None,
    softcap: float | None = None,
) -> np.ndarray:
    """Dense causal attention in float64: query [T, N, D] over key and value [L, K, D], output [T, N, D].

    Query row i stands at position `first_position + i` (by default the queries are the last T tokens) and
    sees positions p - sliding_window < j <= p. `sink_logits` [N] enter the denominator alone.
    With a softcap of c a scaled score x counts as c * tanh(x / c).
    """
    tokens, query_heads, _ = query.shape
    length, heads, _ = key.shape
    group = query_heads // heads
    first = length - tokens if first_position is None else first_position
    position, stored = first + np.arange(tokens)[:, None], np.arange(length)[None]
    visible = stored <= position
    if sliding_window is not None:
        visible &= stored > position - sliding_window
    q = query.astype(np.float64).reshape(tokens, heads, group, -1)
    scores = np.einsum("tkgd,lkd->kgtl", q, key.astype(np.float64)) * softmax_scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(visible, scores, -np.inf)
    peak = scores.max(axis=-1, keepdims=True)
    if sink_logits is not None:
        extra = sink_logits.astype(np.float64).reshape(heads, group, 1, 1)
        peak = np.maximum(peak, extra)
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    if sink_logits is not None:
        total = total + np.exp(extra - peak)
    out = np.einsum("kgtl,lkd->tkgd", weights / total, value.astype(np.float64))
    return out.reshape(tokens, query_heads, -1)
