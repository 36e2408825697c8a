"""The converter of the Torch package: the same files as the JAX one's, in an installation without JAX."""

import subprocess
import sys
from pathlib import Path

import pytest

from oscar_jax.interchange import convert as jax_convert
from oscar_torch.core.errors import ConfigError
from oscar_torch.interchange import convert, inspect
from parity_tests.interchange.test_interchange import assert_same_files, load, write_config, write_pair

ROOT = Path(__file__).parents[2]
FILES = ("k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt")


@pytest.mark.parametrize("heads, version", [(None, 1), (2, 2), (2, 3), (None, 3)])
def test_both_packages_convert_to_the_same_bytes(tmp_path, heads, version):
    states = write_pair(tmp_path / "pair", heads=heads, version=version)
    model = write_config(tmp_path / "model")
    for number, package in enumerate((jax_convert, convert)):
        report = package.convert(tmp_path / "pair", tmp_path / f"{number}.safetensors", model=model)
        assert report.source == "pair" and report.layers == 2
        package.convert(tmp_path / f"{number}.safetensors", tmp_path / f"out{number}", target="pair")
        for state, name in zip(states.values(), FILES):
            assert_same_files(state, load(tmp_path / f"out{number}" / name))
    assert (tmp_path / "0.safetensors").read_bytes() == (tmp_path / "1.safetensors").read_bytes()
    jax_convert.convert(tmp_path / "0.safetensors", tmp_path / "directory", target="orbax")
    convert.convert(tmp_path / "directory", tmp_path / "2.safetensors")
    assert (tmp_path / "2.safetensors").read_bytes() == (tmp_path / "0.safetensors").read_bytes()
    assert inspect.inspect(tmp_path / "directory").summary["layer_ids"] == [3, 7]


def test_what_needs_jax_says_so(tmp_path):
    write_pair(tmp_path / "pair")
    for destination, options in (
        ("set", {}),
        ("x.gguf", {"base": tmp_path / "base.gguf"}),
        ("model", {"target": "absorb", "base": tmp_path / "base"}),
    ):
        with pytest.raises(ConfigError, match=r"needs JAX: pip install 'oscar-kv\[jax"):
            convert.convert(tmp_path / "pair", tmp_path / destination, **options)
        assert not (tmp_path / destination).exists()
    with pytest.raises(ConfigError, match="needs JAX"):
        convert.load_any(write_file(tmp_path / "x.gguf"))


def write_file(path):
    path.write_bytes(b"GGUF")
    return path


ALONE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"jax", "jaxlib", "flax", "orbax", "oscar_jax", "transformers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from oscar_torch.interchange import convert, inspect
convert.convert(sys.argv[1], sys.argv[2])
convert.convert(sys.argv[2], sys.argv[3], target="pair")
print(inspect.inspect(sys.argv[2]).text())
"""


def test_without_jax(tmp_path):
    states = write_pair(tmp_path / "pair")
    arguments = [str(tmp_path / name) for name in ("pair", "set.safetensors", "out")]
    run = subprocess.run(
        [sys.executable, "-c", ALONE, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert "head_dim: 32" in run.stdout
    for state, name in zip(states.values(), FILES):
        assert_same_files(state, load(tmp_path / "out" / name))
