"""P @ V of a page of INT2 values: two kinds of products, chosen by the number of query heads of a tile."""

import functools
from typing import Any

from ..machine import fragments as frag
from .geometry import TINY

# The maximum is only moved when P, summed over a lane's tokens of a page, exceeds this: after the first page
# hardly ever. P in fixed point is a fraction of the page's own largest.
_SLACK = 2.0**24
# P in float16 is used as it is, so there the sum of P * scale counts; a scale of 0 must not hide a huge P.
_HALF_MAX, _HALF_SLACK = 60000.0, 2.0**60
_FRACTION_MAX = 65000.0  # largest fixed-point P * scale; a page's sum of 64 with code 3 is below 2**24
_WHOLE = 2.0**23  # added to a float, leaves its nearest integer in the low bits


def sum_columns(rows: list[list]) -> list:
    """Per lane head the sum over the rows [r][head]."""
    return [functools.reduce(lambda a, b: a + b, column) for column in zip(*rows)]


class BytesTimesValues:
    """P @ V of a page in 8-bit products, for at most four query heads per tile.

    P times the row's scale becomes a fixed-point fraction of the page's largest, whose two bytes lie in
    neighbouring columns; the page's exact integer sums, times a factor, are added to the outputs.
    """

    unit = 1.0  # of the outputs

    def __init__(self, m: Any):
        self.m = m

    def nothing(self) -> list:
        return [*[self.m.Int(0)] * 4, self.m.Float(0.0)]

    def scales(self, scale: list) -> list:
        """What P of row r is multiplied with."""
        return scale

    def sums(self, rows: list[list]) -> list:
        """Per lane head the sum of P * scale."""
        return sum_columns(rows)

    def beyond(self, p_sums: list, sums: list) -> list:
        """Whether the maximum must move, by a lane's sums of P and of P * scale of a page."""
        return [x.gt(_SLACK) for x in p_sums]

    def reference(self, score: list, scale: list, top: Any, unit: Any) -> Any:
        """The score whose P is to be 1, where `top` is the page's largest."""
        return top

    def weights(self, rows: list[list]) -> list:
        """What meets the values of a page, [r] of tokens 8g + r."""
        m, column = self.m, [row[0] for row in rows]
        # No P is negative, so they compare as integers.
        largest = functools.reduce(lambda a, b: a.max(b), [x.as_int() for x in column])
        for distance in (4, 8, 16):
            largest = largest.max(m.shuffle_xor(largest, distance))
        top = largest.as_float().max(TINY)
        steps = top.reciprocal() * _FRACTION_MAX
        steps = [steps * (1 / w) for w in frag.BYTE_WEIGHTS]
        fixed = [x.fma(steps[r & 3], _WHOLE).as_int() for r, x in enumerate(column)]
        # Rows r and r + 4 become neighbouring bytes (high of r, high of r + 4, low of r, low of r + 4), so
        # that after the transpose a word holds what the four bytes of a value word's register r meet.
        words = [m.gather_bytes(fixed[r], fixed[r + 4], 0x4051) for r in range(4)]
        return [*(m.transpose_8x8(w) for w in words), top * (1 / _FRACTION_MAX)]

    def add(self, acc: list, weights: list, values: list, some_tiles: range) -> list:
        """acc + P @ V for 16 channels per tile."""
        acc, factor = list(acc), weights[4]
        for u in some_tiles:
            left = [frag.unpack_bytes(values[2 * u + h]) for h in range(2)]
            sums = [self.m.Int(0)] * 4
            for s in (0, 2):
                a = [left[0][s], left[1][s], left[0][s + 1], left[1][s + 1]]
                sums = self.m.mma_s8(a, weights[s : s + 2], sums, unsigned_a=True, unsigned_b=True)
            for i, (high, low) in enumerate((sums[:2], sums[2:]), 2 * u):
                acc[i] = ((high << 8) + low).to_float().fma(factor, acc[i])
        return acc


class HalvesTimesValues:
    """P @ V of a page in float16 products, for more than four query heads per tile.

    Two bytes of P for eight heads would be two products, and their sums cost more to add up than float16
    codes cost to unpack. P times the row's scale is at most _HALF_MAX, and the products are added to the
    outputs where they are made.
    """

    unit = 2.0**24  # codes are subnormal numbers

    def __init__(self, m: Any):
        self.m = m

    def nothing(self) -> list:
        return [self.m.Int(0)] * 8

    def scales(self, scale: list) -> list:
        """What P of row r is multiplied with: the weight of the row's codes is undone."""
        return [x * (1 / w) for x, w in zip(scale, frag.HALF_WEIGHTS)]

    def sums(self, rows: list[list]) -> list:
        """Per lane head the sum of P * scale."""
        total = rows[0]
        for row, w in zip(rows[1:], frag.HALF_WEIGHTS[1:]):
            total = [x.fma(float(w), y) for x, y in zip(row, total)]
        return total

    def beyond(self, p_sums: list, sums: list) -> list:
        """Whether the maximum must move, by a lane's sums of P and of P * scale of a page."""
        return [*(x.gt(_HALF_SLACK) for x in p_sums), *(x.gt(_HALF_MAX) for x in sums)]

    def reference(self, score: list, scale: list, top: Any, unit: Any) -> Any:
        """The score whose P is to be 1, where `top` is the page's largest: P * scale becomes 2**8 at most."""
        m = self.m
        largest = m.Float(2.0**-40)
        for x, y, w in zip(score, scale, frag.HALF_WEIGHTS):
            largest = largest.max(((x - top) * unit).exp2() * (y * float(w)))
        for distance in (4, 8, 16):
            largest = largest.max(m.shuffle_xor(largest, distance))
        return (largest.log2() - 8.0).fma(unit.reciprocal(), top)

    def weights(self, rows: list[list]) -> list:
        """What meets the values of a page, [r] of tokens 8g + r."""
        return [self.m.transpose_8x8(self.m.pack_float16(*row)) for row in rows]

    def add(self, acc: list, weights: list, values: list, some_tiles: range) -> list:
        """acc + P @ V for 16 channels per tile."""
        acc = list(acc)
        for u in some_tiles:
            left = [frag.unpack_halves(values[2 * u + h]) for h in range(2)]
            for s in (0, 2, 4, 6):
                a = [left[0][s], left[1][s], left[0][s + 1], left[1][s + 1]]
                acc[4 * u : 4 * u + 4] = self.m.mma_f16(a, weights[s : s + 2], acc[4 * u : 4 * u + 4])
        return acc
