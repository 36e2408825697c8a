"""Failure 40 of the README: a rotation set that an earlier Orbax wrote stays readable, in both packages.

golden/rotations was written once, by orbax-checkpoint 0.12.8 (header.json names all versions), and
golden/rotations.safetensors from the same arrays. They never change; a new version of Orbax must read them.
"""

import numpy as np
import pytest

from parity_tests.conformance.frameworks import Framework
from parity_tests.golden.make_golden import GOLDEN

FIELDS = (
    "key_transform",
    "query_transform",
    "value_transform",
    "output_transform",
    "value_mean",
    "key_mean",
    "key_multiplier",
    "value_multiplier",
)


def test_old_directory_is_read(framework: Framework) -> None:
    """Header and every byte of every layer equal the framework-neutral file of the same day."""
    checkpoint = framework.module("rotations.store")
    old = checkpoint.load_rotation_set(GOLDEN / "rotations")
    neutral = checkpoint.load_rotation_set(GOLDEN / "rotations.safetensors")
    assert old.header.to_dict() == neutral.header.to_dict()
    assert old.header.versions["orbax-checkpoint"] == "0.12.8" and old.header.created == "2026-11-29"
    assert sorted(old.layers) == sorted(neutral.layers) == [0, 3]
    for layer, rotation in old.layers.items():
        for name in FIELDS:
            mine, other = (framework.numpy(getattr(one, name)) for one in (rotation, neutral.layers[layer]))
            assert mine.dtype == other.dtype
            np.testing.assert_array_equal(mine, other, err_msg=f"{name} of layer {layer}")


def test_a_changed_byte_is_refused(framework: Framework, tmp_path) -> None:
    """The digests that were written with the old directory still guard it."""
    import json
    import shutil

    copy = tmp_path / "rotations"
    shutil.copytree(GOLDEN / "rotations", copy)
    document = json.loads((copy / "header.json").read_text())
    document["digests"]["layers.3.key_transform"] = "0" * 64
    (copy / "header.json").write_text(json.dumps(document))
    error = framework.module("core.errors").CheckpointError
    with pytest.raises(error, match=r"layer 3.*key_transform|layers\.3\.key_transform"):
        framework.module("rotations.store").load_rotation_set(copy)
