"""Sequential rounding in Gluon (format page, section 2, steps 8a to 8c), for pages of `gluon_page.py`.

The rotated columns of keys lie as those of values do: of every group of 32 channels a lane has 8 neighbours
of its two tokens. So their units U are the left operand of a product as they lie. The groups follow each
other; what a group would be fed by groups of its own block are zeros. Where blocks have 16 channels, a group
is coded twice: the units of the first pass feed its own second block.

An entry W is kept as the bits of the float BIAS + W: products add integers to them. For up to 256 channels a
float holds whatever matters: |W| < 12 * D * 2**12 <= BIAS at the start, so that it is positive; its bits grow
with W and are exact for |W| <= 2**22; a feedback is below 240 * 127**2 < 2**22; and code and U are saturated
as of |W| = 2**15.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_steps import (
    exchange_tokens,
    index_along,
    linear,
    power_of_two,
    span,
    split8,
    split16,
    spread,
)
from .sequential import UNIT_BITS
from .steps import CODES, PAGE

GROUP = gl.constexpr(32)  # channels of one product's contraction
BIAS = gl.constexpr(1.5 * 2.0**23)
FLOOR_BITS = gl.constexpr("fma.rm.f32 $0, $1, $2, 0f4B400000;")  # BIAS + floor($1 * $2)
# U of four entries, of their V and 2 S, floors and starts (`store_sequential`): the second bytes of sums. The
# numbers are 1 / 65280 and 65280.
UNITS = gl.constexpr(
    "{ .reg .b32 t, a, b, c, d;"
    + "".join(
        f" abs.f32 {x}, ${1 + n}; sub.f32 {x}, {x}, ${5 + n}; mul.f32 t, ${1 + n}, {x};"
        f" abs.f32 {x}, {x}; fma.rn.sat.f32 {x}, {x}, 0f37808081, ${9 + n};"
        f" and.b32 t, t, 0x80000000; xor.b32 {x}, {x}, t; fma.rn.f32 {x}, {x}, 0f477F0000, ${13 + n};"
        for n, x in enumerate("abcd")
    )
    + " prmt.b32 a, a, b, 0x51; prmt.b32 c, c, d, 0x51; prmt.b32 $0, a, c, 0x5410; }"
)
RECIPROCAL = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@gluon.constexpr_function
def _code_assembly(entries: int) -> str:
    """A word of `entries` codes, of numbers below 0, from -2 to 2, and of 2 and more.

    Their two upper bits, sign and whether the size is 2 or more, are shifted in. The upper bit of a code is
    that there is no sign, the lower one that just one of the two is set.
    """
    lines = ["{ .reg .b32 t, w;", "mov.b32 w, 0;"]
    lines += [f"shf.l.wrap.b32 w, ${1 + i}, w, 2;" for i in reversed(range(entries))]
    lines.append("shr.u32 t, w, 1; xor.b32 t, t, w; and.b32 t, t, 0x55555555;")
    return "\n".join([*lines, "not.b32 w, w; and.b32 w, w, 0xAAAAAAAA; or.b32 $0, w, t; }"])


KEY_CODES = gl.constexpr(_code_assembly(8))
VALUE_CODES = gl.constexpr(_code_assembly(16))

# ------------------------------------------------------------------------------------------ layouts

SUMS = gl.constexpr(
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, GROUP.value, 32])
)
LEFT = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 4))
# [64 tokens, 4 c, 8]: a lane's entries of a group, as the products have them, and by the bytes of a word.
ENTRIES = gl.constexpr(
    linear([64, 4, 8], [(2, 1), (0, 1), (2, 2), (2, 4)], [(1, 1), (1, 2), *span(0, 2, 16)], span(0, 16, 64))
)
BYTES = gl.constexpr(
    linear([64, 4, 8], [(2, 1), (2, 2), (0, 1), (2, 4)], [(1, 1), (1, 2), *span(0, 2, 16)], span(0, 16, 64))
)


@gluon.constexpr_function
def _feedback_layout(D: int, words: bool):
    """[GROUP, D]: a thread has neighbours of four rows, or their columns one by one: words of bytes."""
    rows, columns = span(0, 1, 4), span(1, 1, D // 16)
    registers = [*rows, *columns] if words else [*columns, *rows]
    return linear([32, D], registers, [*span(1, D // 16, D), (0, 4)], span(0, 8, 32))


# ------------------------------------------------------------------------------------------ steps


@gluon.constexpr_function
def _feeding_groups(D: int, STEPS: int) -> int:
    """Groups that feed others: all but the last, which feeds its own second block where it has one."""
    return D // 32 if D // STEPS < 32 else D // 32 - 1


@gluon.jit
def load_feedback(feedback_ptr, shift_ptr, head, stride_rotation, D: gl.constexpr, STEPS: gl.constexpr):
    """A head's feedback in registers, for `stage_feedback`, and its shift; nothing where STEPS is 0."""
    if STEPS > 0:
        feedback_ptr += head * stride_rotation * D * D
        layout: gl.constexpr = _feedback_layout(D, False)
        source = gl.arange(0, GROUP, layout=gl.SliceLayout(1, layout))
        target = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
        groups = ()
        for group in gl.static_range(_feeding_groups(D, STEPS)):
            groups += (gl.load(feedback_ptr + (group * GROUP + source)[:, None] * D + target[None, :]),)
        return groups, gl.load(shift_ptr + head * stride_rotation)
    else:
        return (), 0


@gluon.jit
def stage_feedback(loaded, D: gl.constexpr, STEPS: gl.constexpr):
    """Loaded feedback -> in shared memory [groups, D columns, contraction index], in operand order."""
    if STEPS > 0:
        groups: gl.constexpr = _feeding_groups(D, STEPS)
        shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=GROUP, element_bitwidth=8, rank=2)
        feedback = gl.allocate_shared_memory(gl.int8, [groups, D, GROUP], shared)
        for group in gl.static_range(groups):
            x = gl.convert_layout(loaded[group], _feedback_layout(D, True))
            x = x.reshape([4, 2, 4, D // GROUP, 4, 4, 2]).permute((3, 5, 4, 6, 1, 0, 2))  # sources c, h, b
            feedback.index(group).store(x.reshape([D, GROUP]))
        fence_async_shared()
        return feedback
    else:
        return 0


@gluon.jit
def _groups(y):
    """Columns of a product of 64 -> those of two groups."""
    return gl.split(y.reshape([PAGE, 4, 2, 8]).permute((0, 1, 3, 2)))


@gluon.jit
def _sums(y, factor):
    """Entries Y -> W = floor(Y * factor), where products can add to them: bits of BIAS + W."""
    w = gl.inline_asm_elementwise(
        FLOOR_BITS, "=r,r,r", [y, spread(factor, y)], dtype=gl.int32, is_pure=True, pack=1
    )
    w = w.reshape([4, 8, 2, 4, 4, 2]).permute((0, 2, 1, 4, 3, 5)).reshape([PAGE, GROUP])
    return gl.convert_layout(w, SUMS, assert_trivial=True)


@gluon.jit
def _feed(units, feedback, group: gl.constexpr, sums):
    """Step 8c: adds to a group what the units of an earlier one feed it: under way."""
    columns = feedback.slice(group * GROUP, GROUP).permute((1, 0))
    return warpgroup_mma(units, columns, sums, is_async=True)


@gluon.jit
def _odd(sums, unit):
    """W -> V = 2 W + 1, odd, so that it is neither 0 nor as large as 2 S; times a power of two.

    In one operation V = (BIAS + W) (2 + 2**-22) - 2 BIAS - 2 less W * 2**-22, which is next to nothing where
    it matters (`store_sequential`).
    """
    w = sums.reshape([4, 2, 8, 4, 4, 2]).permute((0, 2, 1, 4, 3, 5)).reshape([PAGE, 4, 8])
    w = gl.convert_layout(w, ENTRIES, assert_trivial=True).to(gl.float32, bitcast=True)
    return gl.fma(w, unit * (2 + 2.0**-22), unit * (-2 * BIAS - 2))


@gluon.jit
def _units(v, bound, floor, start):
    """Step 8b: U of a group's entries, the left operand of `_feed`."""
    v = gl.convert_layout(v, BYTES)
    u = gl.inline_asm_elementwise(
        UNITS, "=r" + ",r" * 16, [v, spread(bound, v), spread(floor, v), spread(start, v)],
        dtype=gl.int8, is_pure=True, pack=4,
    )  # fmt: skip
    u = u.reshape([4, 8, 2, 4, 2, 4]).permute((0, 2, 1, 4, 3, 5)).reshape([PAGE, GROUP])
    return gl.convert_layout(u, LEFT, assert_trivial=True)


@gluon.jit
def _store_group(v, inverse, codes_ptr, group: gl.constexpr, IS_KEY: gl.constexpr, D: gl.constexpr):
    """Packs and stores the codes of one group of a page; inverse: of S, codes_ptr is at the page and head."""
    v *= spread(inverse, v)
    if IS_KEY:  # a lane has the 8 codes of half a word, of two tokens
        words = gl.inline_asm_elementwise(
            KEY_CODES, "=r" + ",r" * 8, split8(v), dtype=gl.int32, is_pure=True, pack=1
        )
        halves_ptr = codes_ptr.to(gl.pointer_type(gl.int16), bitcast=True)
        offset = index_along(words, 0) * (2 * D // CODES) + group * 4 + index_along(words, 1)
        gl.store(halves_ptr + offset + index_along(words, 2), words.to(gl.int16))
    else:
        v = v.reshape([32, 2, 4, 8]).permute((0, 2, 3, 1)).reshape([32, 4, 16])
        words = gl.inline_asm_elementwise(
            VALUE_CODES, "=r" + ",r" * 16, split16(v), dtype=gl.int32, is_pure=True, pack=1
        )
        words = exchange_tokens(words)
        row = index_along(words, 0)
        channel = group * GROUP + index_along(words, 1) * 8 + index_along(words, 2) + row % 8
        gl.store(codes_ptr + channel * (PAGE // CODES) + row // 8, words)


@gluon.jit
def store_sequential(
    y, s, shift, feedback, codes_ptr, IS_KEY: gl.constexpr, D: gl.constexpr, STEPS: gl.constexpr
):  # fmt: skip
    """Step 8 and packing: rotated columns y, 64 by 64, and thresholds s [64] into a page and head.

    Codes: of V / S below 0, from -2 to 2 and of 2 and more; V is odd, so that rounding does not matter.

    With u = 2**(7 - shift), e = 1 where S is even, else 0, and D = |V| - 2 S: U is the floor of
    (r + 128 - e * u) / 256, where r = (2 R + e) * u is (|D| - S) * u where V and D have one sign, else its
    negative. Cut off at 127 * 256 before the sign, r leads to 127 or -127 whatever S and the shift are: of
    (r + 2**15) / (255 * 256) that is what a sum does that stops at 1, and 2**15 more or less, by the sign, is
    2**15 more for the second byte. What these sums round off is less than 2**-6 together, and the last one
    rounds to integers.
    """
    exponent = (gl.maximum(s, 1).to(gl.float32).to(gl.int32, bitcast=True) >> 23) - 127
    p = exponent - UNIT_BITS - shift
    s = (s << gl.maximum(-p, 0)) >> gl.maximum(p, 0)
    factor = power_of_two(127 - p)
    unit = power_of_two(127 + 7 - shift)
    bound = s.to(gl.float32) * unit
    start = BIAS + 32768 + 128 - (1 - (s & 1)).to(gl.float32) * unit
    floor = (32768 - bound) * (1 / 65280)
    # Where S is 0 no V is small.
    inverse = gl.inline_asm_elementwise(
        RECIPROCAL, "=r,r", [gl.maximum(bound, unit * 0.25)], dtype=gl.float32, is_pure=True, pack=1
    )
    bound *= 2
    entries = _groups(y[0])
    if D > 64:
        entries += _groups(y[1])
    units = ()
    sums = _sums(entries[0], factor)
    for group in gl.static_range(D // GROUP):
        v = _odd(sums, unit)
        if D // STEPS < GROUP:
            sums = _feed(_units(v, bound, floor, start), feedback.index(group), group, sums)
            v = _odd(warpgroup_mma_wait(0, deps=[sums]), unit)
        if group + 1 < D // GROUP:
            # The next group is fed while this one is packed.
            units += (_units(v, bound, floor, start),)
            sums = _sums(entries[group + 1], factor)
            for source in gl.static_range(group + 1):
                sums = _feed(units[source], feedback.index(source), group + 1, sums)
        _store_group(v, inverse, codes_ptr, group, IS_KEY, D)
        if group + 1 < D // GROUP:
            sums = warpgroup_mma_wait(0, deps=[sums])
