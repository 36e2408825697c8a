"""Weights from disk: Hugging Face safetensors (single or sharded), GGUF files, installed packages.

Readers only say which tensors they have, with Hugging Face names and shapes; one function compares them with
what the decoder needs, reports everything that is missing, extra or misshapen at once, and fills the model
tensor by tensor, so that no second copy of the weights exists.
"""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from ..core.errors import CheckpointError
from ..core.fingerprint import EMBEDDING_ROWS, fingerprint_weights
from ..core.weight_packages import WEIGHT_PACKAGES, assembled_package
from .config import ModelConfig
from .decoder import Decoder, split_columns
from .family import Family, LazyTensor, TensorSource, all_families
from .gguf_config import config_from_gguf
from .gguf_file import GGUFFile
from .hf_config import read_hf_config, read_quantization
from .quantized import dequantized
from .safetensors_file import SafetensorsFile
from .tokenizer import leading_bos, load_tokenizer

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
# Buffers, towers and guessers of further tokens in Hugging Face files, which a text decoder does not use.
_HF_IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|^(model\.)?(vision_tower|multi_modal_projector|visual)\.|^mtp\."
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where weights go, over how many `shards` a model is spread (`ModelConfig.for_shards`).

    `sharding_of` gets a parameter's name in the decoder, "layers.0.mlp.down_proj.kernel", and its shape.
    """

    shards: int
    sharding_of: Callable[[str, tuple[int, ...]], jax.sharding.Sharding]


def load_model(
    path: str | Path,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    placement: Placement | None = None,
) -> tuple[Decoder, ModelConfig, Any]:
    """Decoder, its configuration and its tokenizer from a directory, a .gguf file or a weights package.

    `dtype` is the compute dtype: by default float32 on CPU, bfloat16 elsewhere; `param_dtype`, by default the
    same, that of the stored weights. The configuration's bos_token_id is the one
    the tokenizer puts before texts. With a `placement` each host reads the parts that its devices hold, and
    the configuration stays the checkpoint's. Raises CheckpointError or ConfigError naming the cause.
    """
    if dtype is None:
        dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    path = resolve_model_path(path)
    config, source = open_checkpoint(path)
    with ThreadPoolExecutor(1) as beside:  # reading a vocabulary takes seconds, and is one thread
        waiting = beside.submit(load_tokenizer, path)
        model = build_model(
            config,
            source,
            dtype=dtype,
            param_dtype=dtype if param_dtype is None else param_dtype,
            placement=placement,
        )
        tokenizer = waiting.result()
    config = dataclasses.replace(config, bos_token_id=leading_bos(tokenizer))
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
    return assembled_package(str(path))


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
    stored = {
        _hf_name(name, family): name
        for name in file.tensors
        if name != _GGUF_ROPE_DIVISORS and _gguf_block(name) < config.num_layers
    }

    shapes = {name: file.tensors[source].shape for name, source in stored.items()}

    def load(name: str) -> LazyTensor:
        interleaved = re.search(r"\.self_attn\.[qk]_proj\.", name) if family.gguf_interleaves_rope else None

        def read(index: tuple[slice, ...]) -> np.ndarray:
            if not interleaved:
                return file.load(stored[name], index)
            # Whole heads are read, and their rows put in order.
            rows, width = index[0], config.head_dim
            first, last = rows.start // width, -(-rows.stop // width)
            heads = file.load(stored[name], (slice(first * width, last * width), *index[1:]))
            heads = _undo_interleaving(heads, last - first)
            return heads[rows.start - first * width : rows.stop - first * width]

        return LazyTensor(shapes[name], read)

    return family.adapt_gguf(TensorSource(shapes, load, norms_include_one=True), config)


def build_model(
    config: ModelConfig,
    source: TensorSource,
    *,
    dtype: DTypeLike,
    param_dtype: DTypeLike,
    placement: Placement | None = None,
) -> Decoder:
    """The decoder with the source's weights; CheckpointError lists every tensor that does not fit.

    With a `placement` every device gets its own part of each weight, read by its own host, and no other.
    """
    family = all_families()[config.family]
    source = family.adapt(source, config)
    spread = config if placement is None else config.for_shards(placement.shards)
    graph, state = nnx.split(abstract_model(spread, dtype=dtype, param_dtype=param_dtype))
    wanted, structure = jax.tree_util.tree_flatten_with_path(state)
    parameters = [_Parameter.from_path(path, leaf, family, spread) for path, leaf in wanted]
    _check_tensors(parameters, source.shapes, config.tie_embeddings)

    def read(parameter: _Parameter, index: tuple[slice, ...]) -> np.ndarray:
        array = parameter.read(source, index)
        if config.norm_plus_one and parameter.is_norm and not source.norms_include_one:
            array = array.astype(np.float32) + 1.0
        return array

    def fill(parameter: _Parameter) -> jax.Array:
        if placement is None:
            return jnp.asarray(read(parameter, (slice(None),) * len(parameter.shape)), dtype=parameter.dtype)

        @functools.cache  # devices with the same part get the same array
        def part(*bounds: tuple[int, int]) -> np.ndarray:
            array = read(parameter, tuple(slice(*pair) for pair in bounds))
            return np.ascontiguousarray(array.astype(parameter.dtype))

        return jax.make_array_from_callback(
            parameter.shape,
            placement.sharding_of(parameter.name, parameter.shape),
            lambda index: part(*(s.indices(n)[:2] for s, n in zip(index or (), parameter.shape))),
            dtype=parameter.dtype,
        )

    # Threads: NumPy lets go of the interpreter while it dequantizes; few, so that few tensors exist twice.
    with ThreadPoolExecutor(min(_LOADERS, os.cpu_count() or 1)) as pool:
        leaves = list(pool.map(fill, parameters))
    return nnx.merge(graph, jax.tree.unflatten(structure, leaves))


def abstract_model(config: ModelConfig, *, dtype: DTypeLike, param_dtype: DTypeLike) -> Decoder:
    """The decoder with shapes in place of weights."""
    return nnx.eval_shape(lambda: Decoder(config, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0)))


def tensors_of(model: Decoder) -> TensorSource:
    """The tensors of a decoder of one device under Hugging Face names, as a checkpoint would offer them."""
    family = all_families()[model.config.family]
    leaves = jax.tree_util.tree_flatten_with_path(nnx.state(model))[0]
    shapes: dict[str, tuple[int, ...]] = {}
    places: dict[str, tuple[jax.Array, bool, _Piece]] = {}
    for path, leaf in leaves:
        parameter = _Parameter.from_path(path, leaf, family, model.config)
        shapes |= parameter.shapes
        places |= {piece.name: (leaf, parameter.transposed, piece) for piece in parameter.pieces}

    def load(name: str) -> np.ndarray:
        leaf, transposed, piece = places[name]
        array = np.asarray(leaf)
        return (array.swapaxes(-1, -2) if transposed else array)[piece.start : piece.stop]

    return TensorSource(shapes, load, norms_include_one=True)


def parameter_names(state: Any) -> list[str]:
    """The names of a decoder's state in the order of its leaves, such as "layers.0.mlp.down_proj.kernel"."""
    return [_name_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]


def _gguf_block(name: str) -> int:
    """The block of a GGUF tensor, -1 outside; those behind the last layer guess further tokens."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _hf_name(name: str, family: Family) -> str:
    """Hugging Face name of a GGUF tensor; an unknown name is kept, to be reported as extra."""
    stem, _, suffix = name.rpartition(".")
    if stem in _GGUF_TOP:
        return family.tensor_name(f"{_GGUF_TOP[stem]}.{suffix}")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    words = {**_GGUF_LAYER, **family.gguf_names}
    if (bare := re.fullmatch(r"blk\.(\d+)\.(\w+)", name)) and bare[2] in words:
        return family.tensor_name(f"layers.{bare[1]}.{words[bare[2]]}")
    if match and (tensor := words.get(f"{match[2]}.{suffix}")):
        return family.tensor_name(f"layers.{match[1]}.{tensor}")
    if match and match[2] in words:
        return family.tensor_name(f"layers.{match[1]}.{words[match[2]]}.{suffix}")
    return name


def _undo_interleaving(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * D, ...] from the order (0, D/2, 1, D/2 + 1, ...) of each head back to 0, 1, 2, ..."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _name_of(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Rows `start` to `stop` of what is joined: those of the tensor `name` from `first` on."""

    name: str
    start: int
    stop: int
    first: int


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """One parameter of the decoder and the Hugging Face tensors it comes from, joined along their rows."""

    name: str
    shape: tuple[int, ...]
    # by name, as stored: [out, in] for projections, [experts, out, in] for experts'
    shapes: Mapping[str, tuple[int, ...]]
    pieces: tuple[_Piece, ...]  # in the order in which they are joined
    dtype: Any
    transposed: bool
    is_norm: bool

    @classmethod
    def from_path(cls, path: tuple[Any, ...], leaf: Any, family: Family, config: ModelConfig) -> "_Parameter":
        """From a leaf of the decoder's state: "layers.0.mlp.down_proj.kernel" is stored as "....weight"."""
        path_name = _name_of(path)
        module, _, kind = path_name.rpartition(".")
        suffix = "weight" if kind in ("kernel", "embedding") else kind
        transposed = kind == "kernel"
        shape = (*leaf.shape[:-2], leaf.shape[-1], leaf.shape[-2]) if transposed else leaf.shape
        place, _, last = module.rpartition(".")
        parts = {
            family.tensor_name(f"{place}.{part}.{suffix}" if place else f"{part}.{suffix}"): split
            for part, split in _joined(last, config, shape[0]).items()
        }
        pieces, start = [], 0
        for shard in range(max(split.shards for split in parts.values())):
            for name, split in parts.items():
                width = split.width * split.copies // split.shards
                pieces.append(_Piece(name, start, start + width, shard // split.copies * width))
                start += width
        shapes = {name: (split.width, *shape[1:]) for name, split in parts.items()}
        # The norm inside a linear layer has its weight as it is, whatever the others do.
        is_norm = module.endswith("norm") and not module.endswith("linear_attn.norm")
        return cls(path_name, leaf.shape, shapes, tuple(pieces), leaf.dtype, transposed, is_norm)

    def read(self, source: TensorSource, index: tuple[slice, ...]) -> np.ndarray:
        """The part `index` of the parameter, a slice per axis; no more than that is read."""
        stored = (*index[:-2], index[-1], index[-2]) if self.transposed else index
        start, stop, _ = stored[0].indices(self.pieces[-1].stop)
        found = []
        for piece in self.pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                rows = slice(piece.first + low - piece.start, piece.first + high - piece.start)
                found.append(np.asarray(source.load(piece.name)[(rows, *stored[1:])]))
        array = found[0] if len(found) == 1 else np.concatenate(found)
        return array.swapaxes(-1, -2) if self.transposed else array


@dataclasses.dataclass(frozen=True)
class _Split:
    """A stored tensor of `width` rows: in how many pieces it is joined, how often each head stands."""

    width: int
    shards: int = 1
    copies: int = 1


def _joined(module: str, config: ModelConfig, width: int) -> dict[str, _Split]:
    """The tensors that make a module `width` rows wide: its own, or those of a product of several."""
    shards, copies = config.shards, config.head_copies
    query = _Split(config.num_query_heads * config.head_dim, shards)
    key = _Split(config.num_key_value_heads // copies * config.head_dim, shards, copies)
    if module == "qkv_proj":
        gate = {"gate_proj": query} if config.attention_gate else {}
        return {"q_proj": query, "k_proj": key, "v_proj": key, **gate}
    if module == "in_proj" and config.linear is not None:
        return {f"in_proj_{name}": _Split(rows) for name, rows in config.linear.widths.items()}
    if module == "gate_up_proj":
        return {"gate_proj": _Split(width // 2, shards), "up_proj": _Split(width // 2, shards)}
    if module == "k_norm" and config.qk_norm == "projection":
        return {module: key}
    return {module: _Split(width)}


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

    config = model.config
    heads = config.num_key_value_heads // config.head_copies

    def key_weight(layer: int) -> jax.Array:
        attend = model.layers[layer].self_attn
        _, key, *_ = split_columns(attend.qkv_proj.kernel[...], attend.widths, config.shards)
        each = key.reshape(len(key), heads, config.head_copies, -1)[:, :, 0]
        return each.reshape(len(key), -1).T

    arrays = {
        "embedding": model.embed_tokens.embedding[...][:EMBEDDING_ROWS],
        "first_key": key_weight(model.config.attention_layers[0]),
        "last_key": key_weight(model.config.attention_layers[-1]),
    }
    return fingerprint_weights(
        dataclasses.replace(config, num_key_value_heads=heads),
        config.num_layers,
        {
            name: host_array(array.astype(jnp.bfloat16)).view(np.uint16).astype("<u2").tobytes()
            for name, array in arrays.items()
        },
    )


def host_array(array: jax.Array) -> np.ndarray:
    """A whole array in the memory of this host, also if other hosts hold parts of it."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
