"""How page words become matrix-unit operands: unpack rules and index arithmetic, written once.

Every function here is pure arithmetic on integers. The kernels call them with thread registers, the tests
with NumPy arrays, so the mapping that runs on the GPU is the mapping that a CPU checks.

The idea: a code never moves. A lane loads a 32-bit word with 16 codes of one row; masking the word in
place gives registers that *are* the left operand of a warp's matrix product, if the contraction index is
permuted, and the same permutation is applied to the other, tiny operand (query, or probabilities).

    keys, D = 128 (rows = tokens, contraction = channels; mma m16n8k32, unsigned 8-bit x signed 8-bit)

    row t of key_codes         lane 4g + c holds, for each r = 0..7 and j = 0..D/64-1,
                               the word w = D/64 * c + j of token 8g + r:
    +----+----+----+----+----+----+----+----+
    | w0 | w1 | w2 | w3 | w4 | w5 | w6 | w7 |       word w = channels 16w .. 16w+15
    +----+----+----+----+----+----+----+----+       channel 16w + p at bits 2p, 2p+1
      c=0  c=0  c=1  c=1  c=2  c=2  c=3  c=3
      j=0  j=1  j=0  j=1  j=0  j=1  j=0  j=1

    word & 0x03030303        = bytes (code 0, code 4, code  8, code 12)      register 0, weight 1
    word & 0x0c0c0c0c        = bytes (code 1, code 5, code  9, code 13) * 4  register 1, weight 4
    word >> 4 & 0x03030303   = bytes (code 2, code 6, code 10, code 14)      register 2, weight 1
    word >> 4 & 0x0c0c0c0c   = bytes (code 3, code 7, code 11, code 15) * 4  register 3, weight 4

    A (16 tokens x 32)      k =  4c .. 4c+3         k = 16+4c .. 16+4c+3
      row g   : r = 2u           register 2s of (2u,   j)   register 2s+1 of (2u,   j)
      row g+8 : r = 2u + 1       register 2s of (2u+1, j)   register 2s+1 of (2u+1, j)
    for the product's k-step (j, s), s = 0, 1. So k = 4c + b of register p is channel 16w + p + 4b.
    The weight is undone in the query: its entries are fixed-point numbers divided by 1 or 4.

    Pages are staged as they lie in memory, D/4 bytes per token, so that lanes of different g, eight tokens
    apart, find their words in the same banks. Reading other tokens and putting the scores back in order
    afterwards was slower: shared memory has cycles to spare, the instruction slots have not.

    values (rows = channels, contraction = tokens; mma m16n8k32, unsigned 8-bit x unsigned 8-bit)

    lane 4g + c holds the word c (tokens 16c .. 16c+15) of channels g, g+8, g+16, ...; masked like a key word,
    k = 4c + b of register p is token 16c + p + 4b. The other operand needs four bytes of P for these tokens:
    rows 2c and 2c+1 of the score tiles p and p+4 (row g of tile r is token 8g + r). So the bytes of tiles p
    and p+4 are put side by side in one half, and an 8x8 transpose of halves makes the operand. The weight is
    undone in P.

    With more than four query heads the values' product is m16n8k16 in float16 instead:
    word & 0x00030003 << 2p = halves (code p, code 8 + p) * 4**p, p = 0 .. 3, and likewise of word >> 8 for
    p = 4 .. 7. As bits of a float16 number they are code * 4**p * 2**-24 (subnormal), and k = 2c + b of
    register p is token 16c + p + 8b: after an 8x8 transpose of halves, tile p of P is the other operand.

Value words come out of shared memory with `ldmatrix`, which hands row g, bytes 4c..4c+3 of an 8x16-byte
matrix to lane 4g + c; key words with one vector load per token.
"""

BYTE_FIELDS = ((0, 0x03030303), (0, 0x0C0C0C0C), (4, 0x03030303), (4, 0x0C0C0C0C))  # (shift, mask)
BYTE_WEIGHTS = (1, 4, 1, 4)


def unpack_bytes(word):
    """The 16 codes of a word as 4 registers of 4 unsigned bytes, with weights BYTE_WEIGHTS."""
    high = word >> 4
    return [(high if shift else word) & mask for shift, mask in BYTE_FIELDS]


HALF_FIELDS = tuple((8 * (i > 3), 0x00030003 << 2 * (i & 3)) for i in range(8))  # (shift, mask)
HALF_WEIGHTS = (1, 4, 16, 64, 1, 4, 16, 64)  # as float16, a register's halves are code * weight * 2**-24


def unpack_halves(word):
    """The 16 codes of a word as 8 registers of 2 subnormal float16, with weights HALF_WEIGHTS."""
    high = word >> 8
    return [(high if shift else word) & mask for shift, mask in HALF_FIELDS]


def half_token(c, register, half):
    """Token (0..63) of half `half` of register `register` of value word c."""
    return 16 * c + register + 8 * half


def byte_channel(parts, j, c, register, byte):
    """Channel of byte `byte` of register `register` of key word parts * c + j (parts = D/64)."""
    return 16 * (parts * c + j) + register + 4 * byte


def byte_token(c, register, byte):
    """Token (0..63) of byte `byte` of register `register` of value word c."""
    return 16 * c + register + 4 * byte


def score_token(g, row_tile):
    """Token (0..63) of row g of the score tile `row_tile` (0..7)."""
    return 8 * g + row_tile


def dense_channel(block, c, word, half):
    """Channel of half `half` of word `word` (0..3) that lane column c loads of a bf16 row's 32-channel block.

    Sixteen contiguous bytes per lane; words 0, 1 serve the first k-step of the block, words 2, 3 the second.
    """
    return 32 * block + 8 * c + 2 * word + half


def dense_value_channel(block, g, word, half):
    """Channel of half `half` of word `word` (0..3) that lane row g loads of a bf16 row's 64-channel block.

    The halves of neighbouring tokens, side by side, are a word of rows g (half 0) and g + 8 (half 1) of the
    left operand of P @ V.
    """
    return 64 * block + 8 * g + 2 * word + half


def row_token(g, half):
    """Token (0..15 of a warp's 16) of row g (half 0) or g + 8 (half 1) of the row quantizer's tiles.

    Neighbours, so that the four bits of the two rows are the four bits of their tokens in a value word.
    """
    return 2 * g + half


def rotated_channel(n, column, width=64):
    """Output channel of column `column` (0..7) of the n-th product tile of the row quantizer.

    Chosen so that a lane, which receives columns 2c and 2c + 1, collects a quarter of every `width` (16, 32,
    64) channels in order. Of 64 that is key word 4j + c from the eight tiles 8j .. 8j+7. Sequential rounding
    has narrow blocks of channels, of which every lane is to have its share.
    """
    bits = width.bit_length() - 4  # of the number of a tile among those of `width` channels
    first = width * (n >> bits) + (width >> 2) * (column >> 1)
    return first + 2 * (n & (1 << bits) - 1) + (column & 1)
