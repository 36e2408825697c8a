"""Rows and pages: every implementation writes the bytes that the NumPy oracle writes, whatever the rows."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity_tests.conformance import oracle, rows
from parity_tests.conformance.frameworks import Framework
from parity_tests.conformance.vectors import check_vectors, compare_outputs, run_implementation
from parity_tests.conftest import Voice

ROLES = ("key", "value")


def assert_conforms(voice: Voice, vectors: dict[str, np.ndarray]) -> None:
    """The voice and the oracle agree on every byte."""
    got = voice.quantize_pages(check_vectors(vectors))
    difference = compare_outputs(str(vectors["role"]), got, run_implementation("oracle", vectors))
    assert difference is None, f"{voice.implementation.name} on {voice.device}: {difference}"


def random_mean(rng: np.random.Generator, heads: int, head_dim: int) -> np.ndarray:
    return oracle.to_bfloat16(rng.normal(0, 1, (heads, head_dim)))


class TestPages:
    """What every implementation faces; add one to IMPLEMENTATIONS and it is tested here."""

    @pytest.mark.parametrize("family", rows.ROW_FAMILIES)
    @pytest.mark.parametrize("role", ROLES)
    def test_row_families(self, voice: Voice, role: str, family: str) -> None:
        """Every family of rows under every kind of transform, with different multipliers per head."""
        for seed, basis in enumerate(("orthogonal",) if voice.slow else rows.TRANSFORMS):
            rng = np.random.default_rng([seed, list(rows.ROW_FAMILIES).index(family)])
            transform = rows.TRANSFORMS[basis](rng, 2, 64 if voice.slow else 128)
            shape = (128, 2, transform.shape[-1])
            multiplier = rng.choice(rows.MULTIPLIERS, 2)
            mean = random_mean(rng, 2, shape[-1]) * np.uint16(seed % 2)
            bits = rows.ROW_FAMILIES[family](rng, shape)
            assert_conforms(voice, rows.make_vectors(role, bits, transform, multiplier, mean))

    @pytest.mark.parametrize("head_dim", rows.HEAD_DIMS)
    @pytest.mark.parametrize("heads", rows.HEAD_COUNTS)
    def test_shapes(self, voice: Voice, heads: int, head_dim: int) -> None:
        """Every head_dim and head count; transforms per head and shared, keys and values, in turn."""
        if voice.slow and head_dim * heads > 512:
            pytest.skip("slow implementation: small shapes only")
        bases = list(rows.TRANSFORMS)
        turn = rows.HEAD_DIMS.index(head_dim) + rows.HEAD_COUNTS.index(heads)
        for role in ROLES if heads == 2 else (ROLES[turn % 2],):
            turn += 1
            vectors = rows.sample_vectors(
                role, turn, 3, heads, head_dim, bases[turn % len(bases)], shared=bool(turn % 2)
            )
            # three pages drawn from all families: the seed decides which
            rng = np.random.default_rng(turn)
            names = rng.choice(list(rows.ROW_FAMILIES), 3)
            pages = [rows.ROW_FAMILIES[name](rng, (128, heads, head_dim))[:64] for name in names]
            assert_conforms(voice, {**vectors, "rows": np.concatenate(pages)})

    @pytest.mark.parametrize("multiplier", [64, 256])
    @pytest.mark.parametrize("role", ROLES)
    def test_threshold_ties(self, voice: Voice, role: str, multiplier: int) -> None:
        """Y exactly on -s, 0 and s, and one unit of the multiplier beside it."""
        rng = np.random.default_rng(multiplier)
        bits = rows.threshold_ties(rng, (128, 2, 128))
        transform = rows.identity_transform(rng, 2, 128)
        y = oracle.rotate(oracle.fixed_rows(oracle.finite_rows(bits))[0], transform)
        s = (((np.abs(y) >> 3).sum(axis=-1, keepdims=True) // 128) * multiplier) >> 5
        ties = [int((y == -s).sum()), int((y == 0).sum()), int((y == s).sum())]
        assert min(ties) >= 64, f"the rows miss the thresholds: {ties}"
        for beside in (multiplier - 1, multiplier, multiplier + 1):
            assert_conforms(voice, rows.make_vectors(role, bits, transform, beside))

    def test_multipliers(self, voice: Voice) -> None:
        """Every multiplier from 1 to 511, eight heads at a time."""
        rng = np.random.default_rng(8)
        every = np.arange(1, 512)
        batches = [every[:8], every[-8:]] if voice.slow else np.resize(every, (64, 8))
        bits = rows.normal_rows(rng, (64, 8, 64))
        transform = rows.orthogonal_transform(rng, 8, 64)
        for multiplier in batches:
            assert_conforms(voice, rows.make_vectors("key", bits, transform, multiplier))

    def test_repeated_matrices_equal_a_shared_one(self, voice: Voice) -> None:
        """K equal matrices give the bytes of one shared matrix."""
        for role in ROLES:
            shared = rows.sample_vectors(role, 3, 2, 2, 64, shared=True)
            repeated = {
                name: array if name in ("role", "rows") else np.repeat(array, 2, axis=0)
                for name, array in shared.items()
            }
            difference = compare_outputs(role, voice.quantize_pages(repeated), voice.quantize_pages(shared))
            assert difference is None

    @pytest.mark.parametrize("role", ROLES)
    def test_broken_row_stays_alone(self, voice: Voice, role: str) -> None:
        """A row of NaN or infinities counts as zeros; nothing else on any page changes."""
        clean = rows.sample_vectors(role, 1, 2, 2, 64)
        clean["rows"] = rows.normal_rows(np.random.default_rng(1), (128, 2, 64))
        clean["rows"][70, 1] = 0
        expected = voice.quantize_pages(clean)
        for bits in (0x7FC0, 0xFF80, 0x7F80):
            broken = {**clean, "rows": clean["rows"].copy()}
            broken["rows"][70, 1] = bits
            assert compare_outputs(role, voice.quantize_pages(broken), expected) is None
        loud = {**clean, "rows": clean["rows"].copy()}
        loud["rows"][70, 1] = 0x7F00  # finite and enormous: it may change its own page and head only
        got = voice.quantize_pages(loud)
        assert (got["codes"][:, 0] == expected["codes"][:, 0]).all()
        assert (got["codes"][:64] == expected["codes"][:64]).all()
        assert (got["scale"][:64] == expected["scale"][:64]).all()
        assert got["scale"][70, 1] != expected["scale"][70, 1]

    @pytest.mark.parametrize("role", ROLES)
    def test_empty_rows(self, voice: Voice, role: str) -> None:
        """Rows below 2**-64 have codes 3 and scale 0."""
        bits = rows.tiny_rows(np.random.default_rng(0), (64, 1, 64))
        vectors = rows.make_vectors(
            role, bits, rows.orthogonal_transform(np.random.default_rng(1), 1, 64), 371
        )
        result = voice.quantize_pages(vectors)
        assert (result["codes"] == 3).all() and (result["scale"] == 0).all() and (result["words"] == -1).all()

    def test_a_row_by_hand(self, voice: Voice) -> None:
        """One page whose bytes follow from the format page by mental arithmetic.

        Identity, mean 0, multiplier 256. Row: 1, -1, and 62 entries +-0.5. e = 0, X = 8192 or 4096,
        Y = 64 X = 524288 or 262144; |Y| >> 3 = 65536 or 32768, sum 2 * 65536 + 62 * 32768 = 2162688,
        m = 33792, s = 33792 * 256 >> 5 = 270336: only the two ones lie beyond.
        scale = 270336 / 2**19 = 0.515625 exactly.
        """
        row = np.full(64, 0.5)
        row[1::2] = -0.5
        row[:2] = 1, -1
        bits = oracle.to_bfloat16(np.broadcast_to(row, (64, 1, 64)))
        vectors = rows.make_vectors(
            "value", bits, rows.identity_transform(np.random.default_rng(0), 1, 64), 256
        )
        result = voice.quantize_pages(vectors)
        expected = np.array([3, 0] + [2, 1] * 31)
        assert (result["codes"] == expected).all()
        assert (result["scale"] == oracle.to_bfloat16(np.array(0.515625))).all()
        # sixteen equal codes c in a word: c * 0x55555555
        words = (expected.astype(np.uint32) * np.uint32(0x55555555)).view(np.int32)
        assert (result["words"] == words[None, None, :, None]).all()

    def test_hypothesis(self, voice: Voice) -> None:
        """Any families, order of rows, basis, multipliers and means that hypothesis thinks of."""

        @settings(
            max_examples=3 if voice.slow else 30,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],
        )
        @given(
            role=st.sampled_from(ROLES),
            families=st.lists(st.sampled_from(sorted(rows.ROW_FAMILIES)), min_size=2, max_size=2),
            basis=st.sampled_from(sorted(rows.TRANSFORMS)),
            multiplier=st.lists(st.integers(1, 511), min_size=2, max_size=2),
            mean_exponent=st.integers(-70, 64),
            specials=st.lists(
                st.tuples(st.integers(0, 127), st.integers(0, 1), st.integers(0, 63), st.integers(0, 65535)),
                max_size=20,
            ),
            seed=st.integers(0, 2**32 - 1),
        )
        def check(role, families, basis, multiplier, mean_exponent, specials, seed) -> None:
            rng = np.random.default_rng(seed)
            bits = np.concatenate([rows.ROW_FAMILIES[family](rng, (128, 2, 64))[:64] for family in families])
            for token, head, channel, value in specials:
                bits[token, head, channel] = value
            mean = oracle.to_bfloat16(rng.uniform(-1, 1, (2, 64)) * 2.0**mean_exponent)
            transform = rows.TRANSFORMS[basis](rng, 2, 64)
            assert_conforms(voice, rows.make_vectors(role, bits, transform, np.array(multiplier), mean))

        check()


class TestOracle:
    """The oracle against the letter of the format, and against independent arithmetic."""

    @pytest.mark.parametrize("basis", rows.TRANSFORMS)
    @pytest.mark.parametrize("head_dim", [64, 112, 512])
    def test_limbs_add_up(self, basis: str, head_dim: int) -> None:
        """The one exact product of the oracle is what the limbs of steps 5 and 6 give."""
        rng = np.random.default_rng(head_dim)
        transform = rows.TRANSFORMS[basis](rng, 1, head_dim)
        fixed = rng.integers(-(2**14), 2**14 + 1, (24, 1, head_dim)).astype(np.int32)
        fixed[0], fixed[1] = 2**14, -(2**14)
        fixed[2] = 2**14 * np.sign(transform[0, :, 0].astype(np.int32))
        y = oracle.rotate(fixed, transform)
        assert (y == oracle.rotate_by_limbs(fixed, transform)).all()
        assert (np.abs(y.astype(np.int64)) >> 3).sum(axis=-1).max() * 1 < 2**31, "the sum must fit int32"

    def test_bfloat16_rounding(self) -> None:
        """Nearest even on every bf16 number, its upper neighbours and the midpoints between."""
        import ml_dtypes

        high = np.arange(1 << 16, dtype=np.uint32) << 16
        for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
            values = (high | np.uint32(low)).view(np.float32)
            with np.errstate(all="ignore"):
                expected = values.astype(ml_dtypes.bfloat16).view(np.uint16)
            number = ~np.isnan(values)
            assert (oracle.to_bfloat16(values)[number] == expected[number]).all()

    @pytest.mark.parametrize("role", ROLES)
    def test_agrees_with_a_float64_rotation(self, role: str) -> None:
        """At least 99.9 % of the codes equal those of float64 arithmetic; the squared error within 1e-4.

        The float64 side has no rounding at all, not even of the scale. Values vary around their mean, as
        after a calibration.
        """
        rng = np.random.default_rng(5)
        tokens, head_dim = 16384, 128
        bits = rows.normal_rows(rng, (tokens, 1, head_dim))
        rotation = rows.make_rotation(rng, 1, head_dim)
        if role == "value":
            spread = rng.normal(0, 1, bits.shape) * np.exp(rng.normal(0, 1, (tokens, 1, 1)))
            bits = oracle.to_bfloat16(oracle.from_bfloat16(rotation["value_mean"]) + spread)
        transform = rotation[f"{role}_transform"]
        inverse = np.linalg.inv(transform * 2.0**-14)
        result = oracle.quantize_pages(role, bits, transform, np.array([371]), rotation["value_mean"])
        x = oracle.from_bfloat16(bits).astype(np.float64)
        if role == "key":
            exact_mean = x.reshape(-1, 64, 1, head_dim).mean(axis=1).repeat(64, axis=0)
            mean = np.repeat(result["page_mean"], 64, axis=0)
            assert np.abs(oracle.from_bfloat16(mean) - exact_mean).max() < 2**-8 * np.abs(exact_mean).max()
        else:
            mean = rotation["value_mean"][None]
        center = oracle.from_bfloat16(mean).astype(np.float64)
        y = np.einsum("rkd,kde->rke", x - center, transform * 2.0**-14)
        s = np.abs(y).mean(axis=-1, keepdims=True) * 371 / 256
        codes = (y >= -s).astype(int) + (y >= 0) + (y >= s)
        assert (codes == result["codes"]).mean() >= 0.999
        ideal = center + np.einsum("rkd,kde->rke", (codes - 1.5) * s, inverse)
        ours = oracle.reconstruct_rows(result["codes"], result["scale"], mean, inverse)
        ratio = ((ours - x) ** 2).sum() / ((ideal - x) ** 2).sum()
        assert abs(ratio - 1) <= 1e-4, ratio

    def test_page_mean_rounds_twice(self) -> None:
        """float32 first, then bf16: 2**26 + 2**18 + 1 units become a tie and go to even."""
        bits = rows.mean_ties(np.random.default_rng(0), (64, 1, 64))
        mean = np.abs(oracle.from_bfloat16(oracle.page_key_mean(bits[None])))
        assert (mean[0, 0, 1::2] == 1.0).all()  # rounded once it would be 1 + 2**-7


class TestPackages:
    """The public functions of each package beyond whole pages."""

    def test_rows_that_are_not_bfloat16(self, framework: Framework) -> None:
        """float32 rows are rounded to bf16 (nearest even) first."""
        rng = np.random.default_rng(0)
        values = rng.normal(0, 1, (1, 64, 2, 64)).astype(np.float32)
        values[0, 0, 0, :4] = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, np.nan, np.inf])
        transform = framework.array(rows.orthogonal_transform(rng, 2, 64), "cpu")
        multiplier = framework.array(np.array([371, 300], dtype=np.int32), "cpu")
        quantize = framework.module("quantize")
        rounded = framework.bfloat16(oracle.to_bfloat16(values), "cpu")
        for a, b in zip(
            quantize.quantize_key_pages(framework.array(values, "cpu"), transform, multiplier),
            quantize.quantize_key_pages(rounded, transform, multiplier),
        ):
            assert (framework.numpy(a) == framework.numpy(b)).all()

    def test_row_by_row_equals_page(self, framework: Framework) -> None:
        """`quantize_rows` and `page_key_mean` are the pieces that pages are made of."""
        vectors = rows.sample_vectors("key", 2, 4, 2, 64)
        bits = vectors["rows"].reshape(4, 64, 2, 64)
        quantize = framework.module("quantize")
        expected = run_implementation("oracle", vectors)
        mean = framework.numpy(quantize.page_key_mean(framework.bfloat16(bits, "cpu")))
        assert (mean == expected["page_mean"]).all()
        codes, scale = quantize.quantize_rows(
            framework.bfloat16(bits, "cpu"),
            framework.array(vectors["transform"], "cpu"),
            framework.array(vectors["multiplier"], "cpu"),
            framework.bfloat16(mean[:, None], "cpu"),
        )
        assert (framework.numpy(codes).reshape(256, 2, 64) == expected["codes"]).all()
        assert (framework.numpy(scale).reshape(256, 2) == expected["scale"]).all()

    def test_packing(self, framework: Framework) -> None:
        """Words of random codes equal the oracle's, and come back."""
        packing = framework.module("packing")
        codes = np.random.default_rng(0).integers(0, 4, (3, 64, 2, 80)).astype(np.uint8)
        by_head = framework.array(np.ascontiguousarray(codes.transpose(0, 2, 1, 3)), "cpu")
        for role in ROLES:
            words = getattr(packing, f"pack_{role}_codes")(by_head)
            assert (framework.numpy(words) == oracle.pack_pages(role, codes)).all()
            back = framework.numpy(getattr(packing, f"unpack_{role}_codes")(words))
            assert (back == framework.numpy(by_head)).all() and back.dtype == np.uint8

    @pytest.mark.parametrize("role", ROLES)
    def test_reconstruction(self, framework: Framework, role: str) -> None:
        """Dequantized pages equal the oracle's float64 reconstruction to float32 accuracy."""
        rng = np.random.default_rng(4)
        rotation = rows.make_rotation(rng, 2, 96, "skewed" if role == "key" else "orthogonal")
        bits = rows.normal_rows(rng, (128, 2, 96))
        result = oracle.quantize_pages(
            role, bits, rotation[f"{role}_transform"], rotation[f"{role}_multiplier"], rotation["value_mean"]
        )
        scale = np.ascontiguousarray(result["scale"].reshape(2, 64, 2).transpose(0, 2, 1))
        mean = result["page_mean"] if role == "key" else rotation["value_mean"]
        matrix = rotation["query_transform" if role == "key" else "output_transform"]
        inverse = matrix.transpose(0, 2, 1) if role == "key" else matrix
        row_mean = mean.repeat(64, axis=0) if role == "key" else mean[None]
        expected = oracle.reconstruct_rows(result["codes"], result["scale"], row_mean, inverse)
        got = getattr(framework.module("quantize"), f"dequantize_{role}_pages")(
            framework.array(result["words"], "cpu"),
            framework.bfloat16(scale, "cpu"),
            framework.bfloat16(mean, "cpu"),
            framework.array(matrix, "cpu"),
        )
        error = framework.numpy(got).reshape(expected.shape) - expected
        assert np.linalg.norm(error) <= 1e-6 * np.linalg.norm(expected)

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"rows": (2, 63, 2, 64)}, "ShapeError"),
            ({"rows": (64, 2, 64)}, "ShapeError"),
            ({"rows": (2, 64, 2, 72)}, "ShapeError"),
            ({"transform": (2, 64, 32)}, "ShapeError"),
            ({"transform": (3, 64, 64)}, "ShapeError"),
            ({"transform": (64, 64)}, "ShapeError"),
            ({"multiplier": (1,)}, "ShapeError"),
            ({"mean": (2, 32)}, "ShapeError"),
            ({"transform": "int32"}, "DTypeError"),
            ({"multiplier": "float32"}, "DTypeError"),
        ],
        ids=str,
    )
    def test_named_errors(self, framework: Framework, change: dict, error: str) -> None:
        """Wrong shapes and dtypes are refused by name, with the offending value in the message."""
        shapes = {"rows": (2, 64, 2, 64), "transform": (2, 64, 64), "multiplier": (2,), "mean": (2, 64)}
        dtypes = {"rows": "bfloat16", "transform": "int16", "multiplier": "int32", "mean": "bfloat16"}
        (name, value) = next(iter(change.items()))
        (dtypes if isinstance(value, str) else shapes)[name] = value
        arrays = {
            key: framework.bfloat16(np.zeros(shape, np.uint16), "cpu")
            if dtypes[key] == "bfloat16"
            else framework.array(np.ones(shape, dtypes[key]), "cpu")
            for key, shape in shapes.items()
        }
        quantize = framework.module("quantize")
        expected = getattr(framework.module("core.errors"), error)
        offending = value if isinstance(value, str) else "|".join(map(str, value))
        with pytest.raises(expected, match=offending):
            quantize.quantize_value_pages(*arrays.values())
        if name != "mean":
            del arrays["mean"]
            with pytest.raises(expected):
                quantize.quantize_key_pages(*arrays.values())
