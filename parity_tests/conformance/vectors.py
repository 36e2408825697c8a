"""Conformance of one implementation with the INT2 page format, for ours and for anyone's.

    python -m parity_tests.conformance --vectors in.npz --implementation NAME --out out.npz
    python -m parity_tests.conformance --vectors in.npz --implementation NAME
    python -m parity_tests.conformance --vectors in.npz --compare out.npz
    python -m parity_tests.conformance --make-vectors in.npz [--role value] [--pages 16] [--steps 4] ...

`in.npz` holds role ("key" or "value"), rows uint16 [64 P, K, D] (bf16 bits), transform int16 [K or 1, D, D],
multiplier int32 [K or 1] and, for values, mean uint16 [K or 1, D]; with sequential rounding also feedback
int8 [K or 1, D, D], feedback_shift int32 [K or 1] and rounding_steps int32 []. `out.npz` gets codes uint8
[64 P, K, D], scale uint16 [64 P, K], words int32 ([P, K, 64, D/16] for keys, [P, K, D, 4] for values) and,
for keys, page_mean uint16 [P, K, D]. Without --out the result is compared with the NumPy oracle; --compare
does the same with a file that somebody else's implementation wrote.

Exit status: 0 equal (or written), 1 a difference, 2 bad input or an implementation that cannot run here.
"""

import argparse
import dataclasses
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from parity_tests.conformance import oracle, rows
from parity_tests.conformance.frameworks import DEVICES
from parity_tests.conformance.implementations import IMPLEMENTATIONS

PAGES_AT_A_TIME = 64
FEEDBACK = ("feedback", "feedback_shift", "rounding_steps")


class VectorError(ValueError):
    """Vectors that no implementation can be asked about; the message names the array and what is allowed."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two results differ first, in the order page, token, head, channel; and how often they do."""

    array: str
    where: str
    got: int
    expected: int
    count: int

    def __str__(self) -> str:
        return (
            f"{self.array} differs in {self.count} places, first at {self.where}: "
            f"got {self.got & 0xFFFFFFFF:#x}, expected {self.expected & 0xFFFFFFFF:#x}"
        )


# Axis names of every output, in storage order; "row" is split into page and token.
OUTPUT_AXES = {
    "codes": ("row", "head", "channel"),
    "scale": ("row", "head"),
    "page_mean": ("page", "head", "channel"),
    "key words": ("page", "head", "token", "channel_word"),
    "value words": ("page", "head", "channel", "token_word"),
}
ORDER = ("page", "row", "token", "token_word", "head", "channel", "channel_word")


def load_vectors(path: str | Path) -> dict[str, np.ndarray]:
    """Reads and checks an input file; raises VectorError."""
    return check_vectors(_load(path))


def _load(path: str | Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise VectorError(f"{path} is not a readable .npz file: {error}") from error


def check_vectors(vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The vectors, if every array is there with the right type, shape and range; otherwise VectorError."""
    names = ["role", "rows", "transform", "multiplier"]
    missing = [name for name in names if name not in vectors]
    if missing:
        raise VectorError(f"missing arrays: {', '.join(missing)}")
    role = str(vectors["role"][()]) if vectors["role"].ndim == 0 else repr(vectors["role"].tolist())
    if role not in ("key", "value"):
        raise VectorError(f"role = {role!r}, allowed: 'key', 'value'")
    if role == "value":
        names.append("mean")
        if "mean" not in vectors:
            raise VectorError("missing arrays: mean (values need it, keys do not)")
    for name, dtype in (
        ("rows", "uint16"),
        ("transform", "int16"),
        ("multiplier", "int32"),
        ("mean", "uint16"),
    ):
        if name in names and vectors[name].dtype != dtype:
            raise VectorError(f"{name} is {vectors[name].dtype}, allowed: {dtype}")
    shape = vectors["rows"].shape
    if len(shape) != 3 or shape[0] % 64 or 0 in shape:
        raise VectorError(f"rows have shape {shape}, allowed: [64 * pages, K, D] with at least one page")
    _, heads, head_dim = shape
    if head_dim % 16 or head_dim > 512:
        raise VectorError(f"head_dim = {head_dim}, allowed: multiples of 16 up to 512")
    transform = vectors["transform"]
    if transform.shape not in ((1, head_dim, head_dim), (heads, head_dim, head_dim)):
        raise VectorError(
            f"transform has shape {transform.shape}, allowed: [{heads} or 1, {head_dim}, {head_dim}]"
        )
    matrices = len(transform)
    _check_shape("multiplier", vectors["multiplier"], (matrices,))
    multiplier = vectors["multiplier"]
    if ((multiplier < 1) | (multiplier >= 512)).any():
        bad = multiplier[(multiplier < 1) | (multiplier >= 512)][0]
        raise VectorError(f"multiplier = {bad}, allowed: 1..511")
    norm = float(np.sqrt((transform.astype(np.int64) ** 2).sum(axis=1).max())) * 2.0**-14
    if norm > 1:
        raise VectorError(f"transform has a column of norm {norm:.6f}, allowed: at most 1 (units of 2**-14)")
    if role == "value":
        _check_shape("mean", vectors["mean"], (matrices, head_dim))
        mean = oracle.from_bfloat16(vectors["mean"])
        if not (np.abs(mean) <= 2.0**64).all():
            raise VectorError("mean holds NaN, infinity or a magnitude above 2**64")
    if present := [name for name in FEEDBACK if name in vectors]:
        if len(present) < len(FEEDBACK):
            raise VectorError(f"{', '.join(present)} alone, allowed: {', '.join(FEEDBACK)} together or none")
        _check_feedback(vectors, matrices, head_dim)
        names += FEEDBACK
    return {name: vectors[name] for name in names}


def _check_feedback(vectors: Mapping[str, np.ndarray], matrices: int, head_dim: int) -> None:
    """Raises VectorError unless the feedback obeys the format page, section 1."""
    for name, dtype, shape in (
        ("feedback", "int8", (matrices, head_dim, head_dim)),
        ("feedback_shift", "int32", (matrices,)),
        ("rounding_steps", "int32", ()),
    ):
        if vectors[name].dtype != dtype:
            raise VectorError(f"{name} is {vectors[name].dtype}, allowed: {dtype}")
        _check_shape(name, vectors[name], shape)
    steps = int(vectors["rounding_steps"])
    if steps < 2 or head_dim % steps or head_dim // steps < 16:
        raise VectorError(f"rounding_steps = {steps}, allowed: cuts {head_dim} channels into blocks of >= 16")
    matrix, shift = vectors["feedback"], vectors["feedback_shift"]
    block = np.arange(head_dim) // (head_dim // steps)
    if matrix[:, block[:, None] >= block[None]].any():
        raise VectorError("feedback flows into its own or an earlier block")
    if matrix.min() < -127 or shift.min() < 0 or shift.max() > 7:
        raise VectorError(
            f"feedback from {matrix.min()}, feedback_shift {shift.min()}..{shift.max()}, allowed: "
            "-127..127 and 0..7"
        )
    if vectors["multiplier"].min() < 64:
        raise VectorError(f"multiplier = {vectors['multiplier'].min()} with feedback, allowed: 64..511")


def _check_shape(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise VectorError(f"{name} has shape {array.shape}, allowed: {shape}")


def run_implementation(
    name: str, vectors: Mapping[str, np.ndarray], device: str | None = None
) -> dict[str, np.ndarray]:
    """Output arrays of implementation `name`, computed in slices of 64 pages."""
    implementation = IMPLEMENTATIONS[name]
    step = 64 * PAGES_AT_A_TIME
    parts = [
        implementation.quantize_pages(
            str(vectors["role"]),
            vectors["rows"][start : start + step],
            vectors["transform"],
            vectors["multiplier"],
            vectors.get("mean"),
            device,
            rows.feedback_of(vectors),
        )
        for start in range(0, len(vectors["rows"]), step)
    ]
    return {array: np.concatenate([part[array] for part in parts]) for array in parts[0]}


def compare_outputs(
    role: str, got: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> Difference | None:
    """The first difference between two results, or None. Raises VectorError when arrays do not correspond."""
    differences: list[tuple[tuple[int, ...], Difference]] = []
    for name, want in expected.items():
        if name not in got:
            raise VectorError(f"missing arrays: {name}")
        have = got[name]
        if have.dtype != want.dtype or have.shape != want.shape:
            raise VectorError(f"{name} is {have.dtype} {have.shape}, allowed: {want.dtype} {want.shape}")
        unequal = have != want
        if not unequal.any():
            continue
        axes = OUTPUT_AXES[f"{role} words" if name == "words" else name]
        index, labels = _first(unequal, axes)
        found = Difference(name, labels, int(have[index]), int(want[index]), int(unequal.sum()))
        page = index[0] // 64 if axes[0] == "row" else index[0]
        differences.append(((page, list(expected).index(name)), found))
    return min(differences, key=lambda item: item[0])[1] if differences else None


def _first(unequal: np.ndarray, axes: Sequence[str]) -> tuple[tuple[int, ...], str]:
    """Index of the first True in the order page, token, head, channel; and the index in words."""
    order = sorted(range(len(axes)), key=lambda axis: ORDER.index(axes[axis]))
    flat = int(np.argmax(unequal.transpose(order)))
    ordered = np.unravel_index(flat, [unequal.shape[axis] for axis in order])
    index = [0] * len(axes)
    labels = []
    for axis, position in zip(order, ordered):
        index[axis] = int(position)
        if axes[axis] == "row":
            labels += [f"page {position // 64}", f"token {position % 64}"]
        elif axes[axis].endswith("_word"):
            kind = axes[axis].removesuffix("_word")
            labels.append(f"{kind}s {16 * position}..{16 * position + 15} (word {position})")
        else:
            labels.append(f"{axes[axis]} {position}")
    return tuple(index), ", ".join(labels)


def make_parser() -> argparse.ArgumentParser:
    """The command line, documented at the top of this file."""
    parser = argparse.ArgumentParser(
        prog="python -m parity_tests.conformance", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--vectors", type=Path, help="input .npz")
    parser.add_argument("--implementation", help=f"one of {', '.join(IMPLEMENTATIONS)}")
    parser.add_argument("--device", choices=DEVICES, help="where it runs (default: its first device)")
    parser.add_argument("--out", type=Path, help="write the result here instead of comparing it")
    parser.add_argument("--compare", type=Path, help="compare this result file instead of running anything")
    parser.add_argument("--make-vectors", type=Path, metavar="FILE", help="write sample vectors and stop")
    parser.add_argument("--role", choices=("key", "value"), default="key")
    parser.add_argument("--pages", type=int, default=16)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--basis", choices=tuple(rows.TRANSFORMS), default="orthogonal")
    about = "blocks of channels, rounded sequentially (default 0: to the nearest)"
    parser.add_argument("--steps", type=int, default=0, help=about)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def conformance(arguments: argparse.Namespace) -> int:
    """Runs one command; returns the exit status. Raises VectorError on bad input."""
    if arguments.make_vectors:
        if arguments.pages < 1 or arguments.heads < 1 or not 16 <= arguments.head_dim <= 512:
            raise VectorError("--pages and --heads must be at least 1, --head-dim in 16..512")
        if arguments.steps and not 1 < arguments.steps <= arguments.head_dim // 16:
            raise VectorError(f"--steps {arguments.steps}, allowed: 0, or 2 to a 16th of --head-dim")
        made = check_vectors(
            rows.sample_vectors(
                arguments.role,
                arguments.seed,
                arguments.pages,
                arguments.heads,
                arguments.head_dim,
                arguments.basis,
                steps=arguments.steps,
            )
        )
        np.savez_compressed(arguments.make_vectors, **made)  # pyright: ignore[reportArgumentType]
        print(f"{arguments.make_vectors}: {arguments.role} vectors, rows {made['rows'].shape}")
        return 0
    if arguments.vectors is None or (arguments.implementation is None) == (arguments.compare is None):
        raise VectorError("give --vectors and one of --implementation and --compare, or --make-vectors")
    if arguments.compare and arguments.out:
        raise VectorError("--out goes with --implementation, not with --compare")
    name = arguments.implementation
    if name is not None and name not in IMPLEMENTATIONS:
        raise VectorError(f"implementation {name!r}, allowed: {', '.join(IMPLEMENTATIONS)}")
    vectors = load_vectors(arguments.vectors)
    if name is not None:
        device = arguments.device or IMPLEMENTATIONS[name].devices[0]
        reason = IMPLEMENTATIONS[name].why_not(device)
        if reason:
            raise VectorError(f"implementation {name!r} cannot run here: {reason}")
        head_dim = vectors["rows"].shape[-1]
        if "feedback" in vectors and not IMPLEMENTATIONS[name].supports(head_dim, sequential=True):
            raise VectorError(f"implementation {name!r} does not round {head_dim} channels sequentially")
        got = run_implementation(name, vectors, device)
        label = f"{name} ({device})"
    else:
        got, label = _load(arguments.compare), str(arguments.compare)
    if arguments.out:
        np.savez_compressed(arguments.out, **got)  # pyright: ignore[reportArgumentType]
        print(f"{arguments.out}: {', '.join(got)} by {label}")
        return 0
    expected = run_implementation("oracle", vectors)
    role = str(vectors["role"])
    difference = compare_outputs(role, got, expected)
    if difference:
        print(f"DIFFERENT {label}: {difference}")
        return 1
    bytes_compared = sum(array.nbytes for name, array in expected.items() if name != "codes")
    print(
        f"equal {label}: {role} rows {vectors['rows'].shape}, {expected['codes'].size} codes, "
        f"{expected['scale'].size} scales, {bytes_compared} stored bytes, 0 differences from the oracle"
    )
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    try:
        return conformance(make_parser().parse_args(arguments))
    except VectorError as error:
        print(f"bad input: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
