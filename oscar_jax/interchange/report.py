"""What a conversion did: read, carried over, could not carry.

Twin file, byte-identical in both packages: NumPy only.
"""

import dataclasses
import pathlib
from collections.abc import Sequence

from ..core.errors import CheckpointError
from ..rotations import store
from ..rotations.rotation import RotationSet


@dataclasses.dataclass(frozen=True)
class Report:
    """What a conversion read and wrote, what it carried over, what the target cannot hold."""

    source: str
    target: str
    written: tuple[str, ...]
    layers: int
    head_dim: int
    matrices_per_layer: int
    carried: tuple[str, ...]
    dropped: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """The report as lines for a terminal."""
        lines = [
            f"{self.source} -> {self.target}: {self.layers} layers, head_dim {self.head_dim}, "
            f"matrices per role and layer: {self.matrices_per_layer}"
        ]
        for title, items in (
            ("wrote", self.written),
            ("carried", self.carried),
            ("dropped", self.dropped),
            ("note", self.notes),
        ):
            lines += [f"{title:>8}: {item}" for item in items]
        return "\n".join(lines)


def has_means(rotation_set: RotationSet, field: str) -> bool:
    """Whether "key_mean" or "value_mean" is not zero in some layer."""
    return any(layer.numpy()[field].any() for layer in rotation_set.layers.values())


def not_published(rotation_set: RotationSet) -> list[str]:
    """What neither a published pair nor a GGUF file has a place for, if the set has it."""
    items = ["page means of keys (the other stack centers with a fixed mean, or not at all)"]
    if has_means(rotation_set, "value_mean"):
        items.append("value means")
    multipliers = set()
    for layer in rotation_set.layers.values():
        fields = layer.numpy()
        multipliers |= {*fields["key_multiplier"].tolist(), *fields["value_multiplier"].tolist()}
    items.append(f"multipliers {sorted(multipliers)} (the other stack has its own clip ratios)")
    return items


def native_report(rotation_set: RotationSet, target: str, path: pathlib.Path) -> Report:
    """The report of a rotation set just written in a form of its own, read back; CheckpointError."""
    written = store.load_rotation_set(path)
    if written.header != rotation_set.header:
        raise CheckpointError(f"{path}: the header did not survive writing")
    return make_report(rotation_set, target, [str(path)], carried=["everything"], dropped=[])


def make_report(
    rotation_set: RotationSet,
    target: str,
    written: Sequence[str],
    *,
    carried: Sequence[str],
    dropped: Sequence[str],
    notes: Sequence[str] = (),
) -> Report:
    """A report on a rotation set; `convert` fills in the source."""
    heads = max(len(layer.key_transform) for layer in rotation_set.layers.values())
    header = rotation_set.header
    return Report(
        source="rotation set",
        target=target,
        written=tuple(written),
        layers=len(header.layers),
        head_dim=header.head_dim,
        matrices_per_layer=heads,
        carried=tuple(carried),
        dropped=tuple(dropped),
        notes=tuple(notes),
    )
