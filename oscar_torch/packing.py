"""2-bit codes <-> the int32 words of a page.

The order of words inside a page is fixed here and nowhere else. Keys are packed along channels and values
along tokens: 16 codes a word, code i at bits 2i and 2i + 1, words in natural order.
"""

import torch
from torch import Tensor

from .arithmetic import exact_arithmetic
from .core import cache_format as fmt
from .core.errors import ShapeError


@exact_arithmetic
def pack_key_codes(codes: Tensor) -> Tensor:
    """Packs keys: word w of a token holds its channels 16w .. 16w + 15.

    codes uint8 [..., 64, D] in 0..3 -> int32 [..., 64, D/16]. Raises ShapeError unless D is a multiple of 16.
    """
    return _pack(codes)


@exact_arithmetic
def unpack_key_codes(words: Tensor) -> Tensor:
    """Inverse of `pack_key_codes`: int32 [..., 64, D/16] -> uint8 [..., 64, D]."""
    return _unpack(words)


@exact_arithmetic
def pack_value_codes(codes: Tensor) -> Tensor:
    """Packs values: word w of a channel holds the page's tokens 16w .. 16w + 15.

    codes uint8 [..., 64, D] in 0..3 -> int32 [..., D, 4]. Raises ShapeError unless the page has 64 tokens.
    """
    if codes.shape[-2] != fmt.PAGE_TOKENS:
        raise ShapeError(f"codes {tuple(codes.shape)}, expected [..., {fmt.PAGE_TOKENS}, D]")
    return _pack(codes.transpose(-1, -2))


@exact_arithmetic
def unpack_value_codes(words: Tensor) -> Tensor:
    """Inverse of `pack_value_codes`: int32 [..., D, 4] -> uint8 [..., 64, D]."""
    return _unpack(words).transpose(-1, -2)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(fmt.CODES_PER_WORD, dtype=torch.int32, device=device) * fmt.CODE_BITS


def _pack(codes: Tensor) -> Tensor:
    """[..., 16 W] -> int32 [..., W]."""
    if codes.shape[-1] % fmt.CODES_PER_WORD:
        shape = tuple(codes.shape)
        raise ShapeError(f"codes {shape}: the packed axis must be a multiple of {fmt.CODES_PER_WORD}")
    words = codes.shape[-1] // fmt.CODES_PER_WORD
    groups = codes.reshape(*codes.shape[:-1], words, fmt.CODES_PER_WORD).int()
    # The fields do not overlap, so the int32 sum is their bitwise or, sign bit included.
    return (groups << _shifts(codes.device)).sum(dim=-1, dtype=torch.int32)


def _unpack(words: Tensor) -> Tensor:
    """int32 [..., W] -> uint8 [..., 16 W]."""
    codes = ((words[..., None] >> _shifts(words.device)) & 3).to(torch.uint8)
    return codes.reshape(*words.shape[:-1], words.shape[-1] * fmt.CODES_PER_WORD)
