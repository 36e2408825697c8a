"""What a file of rotations contains, without loading a model.

Twin file, byte-identical in both packages: NumPy only.
"""

import dataclasses
import os
import pathlib
from typing import Any

import numpy as np

from ..core import cache_format as fmt
from ..rotations.bases import condition_number, orthogonality_defect
from ..rotations.fixed_point import from_fixed_point
from ..rotations.rotation import RotationSet
from .convert import load_any
from .published_file import PublishedFile, read_published_file


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What a file contains: a structured, JSON-ready summary, and the same as text."""

    summary: dict[str, Any]

    def text(self) -> str:
        """A header block and one line per layer and role, for a terminal."""
        summary = self.summary
        lines = [f"{name:>20}: {summary[name]}" for name in summary if name not in ("layers", "origin")]
        lines += [f"{name:>20}: {value}" for name, value in summary["origin"].items()]
        titles = ("heads", 5), ("defect", 9), ("condition", 9), ("mean", 9), ("alpha", 6)
        lines.append(f"{'layer role':>12} {' '.join(f'{t:>{w}}' for t, w in titles)}  spectrum")
        for row in summary["layers"]:
            spectrum = row["spectrum"]
            described = (
                f"{spectrum['min']:.3g} … {spectrum['max']:.3g}, "
                f"effective rank {spectrum['effective_rank']:.1f}"
                if spectrum
                else "-"
            )
            alpha = f"{row['alpha']:.3f}" if row["alpha"] is not None else "-"
            lines.append(
                f"{row['layer']:>6} {row['role']:>5} {row['heads']:>5} {row['defect']:>9.1e} "
                f"{row['condition']:>9.3f} {row['mean_norm']:>9.3g} {alpha:>6}  {described}"
            )
        return "\n".join(lines)


def inspect(path: str | os.PathLike[str], *, values: str | os.PathLike[str] | None = None) -> Inspection:
    """Geometry, objective, orthogonality, spectrum, means and origin of any form that `load_any` reads.

    A single `.pt` file is shown alone, unless `values` names its partner. The summary's keys: form, model_id,
    head_dim, num_query_heads, num_key_value_heads, basis, objective, num_layers, layer_ids, origin (dict) and
    layers, a list of rows {layer, role, heads, defect, condition, mean_norm, alpha, spectrum}.
    """
    path = pathlib.Path(path)
    if path.suffix == ".pt" and values is None:
        return _inspect_published(read_published_file(path))
    rotation_set, form = load_any(path, values=values)
    header = rotation_set.header
    published = header.extra.get("published", {})
    rows = [_inspect_role(rotation_set, layer, role) for layer in header.layers for role in ("key", "value")]
    return Inspection(
        {
            "form": form,
            "model_id": header.model_id,
            "head_dim": header.head_dim,
            "num_query_heads": header.num_query_heads,
            "num_key_value_heads": header.num_key_value_heads,
            "basis": header.basis,
            "objective": {role: meta.get("objective") for role, meta in published.items()},
            "num_layers": len(header.layers),
            "layer_ids": list(header.layers),
            "origin": {
                "format": fmt.format_id(),
                "basis_version": header.basis_version,
                "rope": header.rope,
                "rounding": header.rounding,
                "created": header.created,
                "corpus_digest": header.corpus_digest,
                "calibration_tokens": header.calibration_tokens,
                "versions": header.versions,
                "extra": header.extra,
            },
            "layers": rows,
        }
    )


def _inspect_role(rotation_set: RotationSet, layer: int, role: str) -> dict[str, Any]:
    fields = rotation_set.layers[layer].numpy()
    transform = from_fixed_point(fields[f"{role}_transform"])
    eigenvalues = rotation_set.companions.get(layer, {}).get(f"{role}_eigenvalues")
    multiplier = fields[f"{role}_multiplier"]
    return {
        "layer": layer,
        "role": role,
        "heads": len(transform),
        "defect": orthogonality_defect(transform),
        "condition": condition_number(transform),
        "mean_norm": _largest_norm(fields[f"{role}_mean"]),
        "alpha": float(multiplier.mean()) / (1 << fmt.MULTIPLIER_BITS),
        "spectrum": _spectrum(eigenvalues),
    }


def _inspect_published(file: PublishedFile) -> Inspection:
    rows = [
        {
            "layer": layer,
            "role": file.role or "?",
            "heads": file.heads,
            "defect": orthogonality_defect(arrays["rotation"]),
            "condition": condition_number(arrays["rotation"]),
            "mean_norm": _largest_norm(arrays.get("k_mean", np.zeros(1))),
            "alpha": None,
            "spectrum": _spectrum(arrays.get("eigenvalues")),
        }
        for layer, arrays in file.layers.items()
    ]
    metadata = dict(file.metadata)
    return Inspection(
        {
            "form": "published file",
            "model_id": file.calibration.get("model_path", "unknown"),
            "head_dim": file.head_dim,
            "num_query_heads": None,
            "num_key_value_heads": file.heads if file.per_head else None,
            "basis": None,
            "objective": {file.role or "unknown role": metadata.pop("objective", None)},
            "num_layers": len(file.layers),
            "layer_ids": list(file.layers),
            "origin": metadata,
            "layers": rows,
        }
    )


def _largest_norm(mean: np.ndarray) -> float:
    return float(np.linalg.norm(np.atleast_2d(mean.astype(np.float64)), axis=-1).max())


def _spectrum(eigenvalues: np.ndarray | None) -> dict[str, float] | None:
    """Extremes and effective rank, exp of the entropy of the normalized spectrum (1…D)."""
    if eigenvalues is None:
        return None
    values = np.maximum(np.asarray(eigenvalues, np.float64).reshape(-1), 0)
    share = values / max(values.sum(), np.finfo(np.float64).tiny)
    entropy = -(share * np.log(np.where(share > 0, share, 1))).sum()
    return {"min": float(values.min()), "max": float(values.max()), "effective_rank": float(np.exp(entropy))}
