"""The INT2 page format `oscar-int2/1`: every constant that decides a byte, and the shapes of the arrays.

Twin file: byte-identical in both packages. Standard library only, so that a reader of
either framework (or of none) can import it.

A page is 64 consecutive tokens of one sequence. Keys are packed along channels, values along tokens, so
that both matrix products of attention read their codes in the order in which they contract them.
"""

FORMAT_NAME = "oscar-int2"
FORMAT_VERSION = 1

PAGE_TOKENS = 64
CODE_BITS = 2
CODES_PER_WORD = 16  # of one int32 word; code i sits at bits 2i and 2i + 1
HEAD_DIM_MULTIPLE = 16
# The sum over D of |Y| >> ABS_SHIFT is at most 2**17 * D**1.5 and must fit int32 (D <= 645). Sums of limb
# products stay below 2**24, where float32 is exact, up to D = 1023.
MAX_HEAD_DIM = 512

# Fixed-point widths of the row quantizer. A row is scaled so that its largest entry has ROW_BITS bits.
ROW_BITS = 13  # X = floor(z * 2**(ROW_BITS - e) + 0.5), |X| <= 2**14
TRANSFORM_BITS = 14  # a transform entry is an int16 in units of 2**-14
TRANSFORM_MAX = 1 << TRANSFORM_BITS
LIMB_BITS = 8
ABS_SHIFT = 3  # |Y| is summed after a right shift, so that the sum over D fits int32
MULTIPLIER_BITS = 8  # alpha is in units of 1/256
MULTIPLIER_SHIFT = MULTIPLIER_BITS - ABS_SHIFT  # s = (mean(|Y| >> 3) * multiplier) >> 5
KEY_MULTIPLIER_DEFAULT = 410  # alpha = 1.60, of keys where nothing else was chosen
VALUE_MULTIPLIER_DEFAULT = 371  # alpha = 1.45, of values
MULTIPLIER_LIMIT = 512  # 1 <= multiplier < 512
SCALE_BITS = 19  # scale = s * 2**(e - 19)
MEAN_BITS = 20  # F = floor(x * 2**(20 - E) + 0.5), the summands of a page's mean key
PAGE_TOKENS_LOG2 = 6  # the mean divides by PAGE_TOKENS
MIN_EXPONENT = -64  # rows whose largest |z| is below 2**-64 are empty
MAX_EXPONENT = 64  # finite inputs are clamped to +-2**64

# Sequential rounding (format page, section 2, steps 8a to 8c).
ROUNDINGS = ("nearest", "sequential")
FEEDBACK_UNIT_BITS = 5  # the scale is 32 to 64 units of an error
FEEDBACK_LIMIT = 127  # of an error and of an entry of the feedback
FEEDBACK_MAX_SHIFT = 7  # entries are in units of 2**-shift
FEEDBACK_MULTIPLIER_MIN = 64  # of a role that is fed: alpha >= 1/4 keeps all sums below 2**26
FEEDBACK_BLOCK_MIN = 16  # channels

SINK_TOKENS = 64
RECENT_TOKENS = 256

# name -> dtype; the shapes are those of `int2_array_shapes`, `window_array_shapes`, `rotation_field_shapes`
INT2_ARRAYS = {
    "key_codes": "int32",
    "value_codes": "int32",
    "key_scale": "bfloat16",
    "value_scale": "bfloat16",
    "key_page_mean": "bfloat16",
}
WINDOW_ARRAYS = {"window_key": "bfloat16", "window_value": "bfloat16"}

ROTATION_FIELDS = {
    "key_transform": "int16",
    "query_transform": "float32",
    "value_transform": "int16",
    "output_transform": "float32",
    "value_mean": "bfloat16",
    "key_mean": "bfloat16",
    "key_multiplier": "int32",
    "value_multiplier": "int32",
}
# Of sequential rounding, beside the fields above; the two of a role come together or not at all.
FEEDBACK_FIELDS = {
    "key_feedback": "int8",
    "key_feedback_shift": "int32",
    "value_feedback": "int8",
    "value_feedback_shift": "int32",
}


def format_id() -> str:
    """The name and version under which files and caches of this format are known."""
    return f"{FORMAT_NAME}/{FORMAT_VERSION}"


def int2_array_shapes(pages: int, key_value_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the INT2 arrays of one layer for `pages` physical pages."""
    return {
        "key_codes": (pages, key_value_heads, PAGE_TOKENS, head_dim // CODES_PER_WORD),
        "value_codes": (pages, key_value_heads, head_dim, PAGE_TOKENS // CODES_PER_WORD),
        "key_scale": (pages, key_value_heads, PAGE_TOKENS),
        "value_scale": (pages, key_value_heads, PAGE_TOKENS),
        "key_page_mean": (pages, key_value_heads, head_dim),
    }


def window_array_shapes(pages: int, key_value_heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the BF16 (sink and recent) arrays of one layer for `pages` physical pages."""
    shape = (pages, key_value_heads, PAGE_TOKENS, head_dim)
    return {name: shape for name in WINDOW_ARRAYS}


def rotation_field_shapes(heads: int, head_dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of one layer's rotation arrays; `heads` is 1 (shared) or the number of key/value heads."""
    matrix, vector, scalar = (heads, head_dim, head_dim), (heads, head_dim), (heads,)
    return {
        "key_transform": matrix,
        "query_transform": matrix,
        "value_transform": matrix,
        "output_transform": matrix,
        "value_mean": vector,
        "key_mean": vector,
        "key_multiplier": scalar,
        "value_multiplier": scalar,
    }


def int2_page_bytes(head_dim: int) -> int:
    """Bytes of one INT2 page of one key/value head: codes, scales and the page's mean key."""
    codes = 2 * PAGE_TOKENS * head_dim * CODE_BITS // 8
    scales = 2 * PAGE_TOKENS * 2
    mean = 2 * head_dim
    return codes + scales + mean


def window_page_bytes(head_dim: int) -> int:
    """Bytes of one BF16 page of one key/value head: 64 raw key rows and 64 raw value rows."""
    return 2 * PAGE_TOKENS * head_dim * 2
