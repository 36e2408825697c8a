"""Steps a decoder through text, several methods or several sequences side by side, and compares the outcomes.

One step takes T tokens of each of B rows of a batch. In an evaluation the rows are methods that all read the
same tokens: row 0 is BF16, the others read INT2 pages or a simulated recipe where decoding would
(`blockwise.py`). In a calibration the rows are sequences, all exact.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..arithmetic import compiled_quickly
from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..models.config import ModelConfig
from ..models.experts import DATA_AXIS, MODEL_AXIS
from ..models.linear_attention import allocate_recurrent_state
from ..models.protocol import LanguageModel
from ..models.weights import host_array
from ..quantize import round_to_bfloat16
from ..rotations.rotation import LayerRotation
from ..sharding.mesh import spread
from . import fidelity, flash_rows
from .blockwise import Partial, StoredRows, allocate_rows, attend_rows, finish, write_rows
from .peers import Float8Recipe, PerChannelRecipe

ModelRows = list[Any]  # per layer StoredRows, or the RecurrentState of a linear one
# How one method stores the history of one layer; None: exact.
Recipe = LayerRotation | fidelity.AsymmetricRecipe | PerChannelRecipe | Float8Recipe | None
JUDGED_ROWS = 32  # positions whose distributions over the vocabulary are in memory at a time, per method


@dataclasses.dataclass(frozen=True)
class Method:
    """One row of the table: a name, how its cache works, and one rotation (or recipe) per quantized layer."""

    name: str
    kind: str  # "bf16" | "int2" | "simulated"
    rotations: Mapping[int, Any]  # layer -> Recipe; empty for bf16
    bits: float  # per stored element of the quantized history
    basis: str = ""


def restore_rows(key: jax.Array, value: jax.Array, recipes: Sequence[Recipe]) -> tuple[jax.Array, jax.Array]:
    """Rows as each method's history returns them: [M, T, K, D], one recipe per row of M -> float32.

    T starts at a page boundary. A last page that is not complete yields rows that no query reads.
    """
    groups: dict[Any, list[int]] = {}
    for row, recipe in enumerate(recipes):
        leaves, tree = jax.tree.flatten(recipe)
        groups.setdefault((tree, tuple(jnp.shape(leaf) for leaf in leaves)), []).append(row)
    parts, order = [], []
    for members in groups.values():
        order += members
        rows = key[jnp.asarray(members)], value[jnp.asarray(members)]
        first = recipes[members[0]]
        if first is None:
            parts.append(tuple(part.astype(jnp.float32) for part in rows))
            continue
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(recipes[row] for row in members))
        parts.append(jax.vmap(_restore)(*rows, stacked))
    back = jnp.asarray(np.argsort(order))
    restored_key, restored_value = (jnp.concatenate(column)[back] for column in zip(*parts))
    return restored_key, restored_value


def _restore(key: jax.Array, value: jax.Array, recipe: Any) -> tuple[jax.Array, jax.Array]:
    """Rows [T, K, D] as the history of one recipe returns them: float32 [T, K, D]."""
    if isinstance(recipe, LayerRotation):
        return fidelity.reconstruct_pages(key, value, recipe)
    return recipe.restore(key, value)


@dataclasses.dataclass(frozen=True)
class Runner:
    """A model ready to be stepped; build it with `make_runner`."""

    config: ModelConfig
    state: Any  # the model's arrays
    step: Callable[..., tuple[jax.Array, ModelRows, list[jax.Array]]]
    judge: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    merge: Callable[[Any], LanguageModel]

    def allocate(self, batch: int, tokens: int, restored: Sequence[int] = ()) -> ModelRows:
        """`allocate_model_rows` of this model."""
        return allocate_model_rows(self.config, batch, tokens, restored)


def allocate_model_rows(
    config: ModelConfig, batch: int, tokens: int, restored: Sequence[int] = ()
) -> ModelRows:
    """Empty rows of every layer, with restored ones beside them in the layers `restored`.

    Inside `jax.set_mesh` they are spread over the mesh: heads, and the batch if it divides.
    """

    def make() -> ModelRows:
        geometry = config.cache_config()
        rows = [
            allocate_recurrent_state(config.linear, batch)
            if config.linear is not None and layer in config.linear_layers
            else allocate_rows(geometry, batch, tokens, restored=layer in restored)
            for layer in range(config.num_layers)
        ]
        return jax.tree.map(lambda store: spread(store, DATA_AXIS, MODEL_AXIS), rows)

    return make() if jax.sharding.get_abstract_mesh().empty else jax.jit(make)()


def padding_of(config: ModelConfig, tokens: jax.Array, count: jax.Array | int | None) -> dict[str, jax.Array]:
    """What a model with recurrent layers must be told: `count` of the rows [B, T] (None: all) are real."""
    if not config.linear_layers or count is None:
        return {}
    return {"new_lengths": jnp.full(tokens.shape[0], count, jnp.int32)}


def make_runner(model: LanguageModel, config: ModelConfig) -> Runner:
    """Compiled steps of a decoder, see `Runner`.

    step(state, tokens int32 [B, T], start, rows, recipes, probes int32 [P], count, capture=layers): tokens
    from position `start` on, a multiple of 64, of which the first `count` (None: all) are real, go through
    the decoder. recipes: layer -> one Recipe per row of the batch. Returns the last hidden rows [B, T, H],
    the rows with the tokens added (the old ones are consumed) and, per captured layer, the queries of row 0
    at the probed rows, float32 [P, N, D].

    judge(state, hidden [M, T, H], index int32 [R], targets int32 [R]): see `compare_distributions`; R is a
    multiple of JUDGED_ROWS.
    """
    graph, state = nnx.split(model)

    @compiled_quickly(static_argnames=("capture",), donate_argnums=(3,))
    def step(state, tokens, start, rows, recipes, probes=None, count=None, capture: tuple[int, ...] = ()):
        queries: list[jax.Array] = []
        tokens = spread(tokens, DATA_AXIS)
        positions = start + jnp.arange(tokens.shape[1])

        def attention(layer: int, query, key, value, state, **sinks):
            if layer in capture:
                queries.append(query[0, probes].astype(jnp.float32))
            part, state = attend_and_store(config, layer, query, key, value, state, start, recipes.get(layer))
            return finish([part], **sinks), state

        hidden, rows = nnx.merge(graph, state).hidden_states(
            tokens,
            rows,
            positions=jnp.broadcast_to(positions, tokens.shape),
            attention=attention,
            **padding_of(config, tokens, count),
        )
        return hidden, rows, queries

    @compiled_quickly()
    def judge(state, hidden, index, targets):
        decoder = nnx.merge(graph, state)

        def block(arguments):
            here, target = arguments
            logits = decoder.logits(hidden[:, here]).astype(jnp.float32)  # [M, JUDGED_ROWS, V]
            return compare_distributions(jax.nn.log_softmax(logits, axis=-1), target)

        shape = (-1, JUDGED_ROWS)
        nll, kl, top1 = jax.lax.map(block, (index.reshape(shape), targets.reshape(shape)))
        return tuple(column.swapaxes(0, 1).reshape(hidden.shape[0], -1) for column in (nll, kl, top1))

    return Runner(config, state, step, judge, functools.partial(nnx.merge, graph))


def make_token_judge(runner: Runner) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Compiled judge(state, hidden [B, T, H], targets int32 [B, T]), each row with its own targets.

    Returns negative log-likelihoods, float32 [B, T], and whether the target is the likeliest token, bool
    [B, T]. T is a multiple of JUDGED_ROWS, or at most that.
    """

    @jax.jit
    def judge(state, hidden, targets):
        decoder = runner.merge(state)
        batch, tokens, width = hidden.shape
        at_a_time = min(JUDGED_ROWS, tokens)

        def block(arguments):
            rows, wanted = arguments
            log_p = jax.nn.log_softmax(decoder.logits(rows).astype(jnp.float32), axis=-1)
            found = jnp.take_along_axis(log_p, wanted[..., None], axis=-1)[..., 0]
            return -found, jnp.argmax(log_p, axis=-1) == wanted

        parts = (
            hidden.reshape(batch, -1, at_a_time, width).swapaxes(0, 1),
            targets.reshape(batch, -1, at_a_time).swapaxes(0, 1),
        )
        columns = jax.lax.map(block, parts)
        return tuple(column.swapaxes(0, 1).reshape(batch, tokens) for column in columns)

    return judge


def attend_and_store(
    config: ModelConfig,
    layer: int,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    stored: StoredRows,
    start: jax.Array | int,
    recipes: Sequence[Recipe] | None,
    measure_coded: bool = False,
) -> tuple[Partial, StoredRows]:
    """One layer's attention over all tokens so far, the new ones stored first; recipes one per batch row.

    `measure_coded` as in `attend_rows`. `start` is a multiple of 64. On a GPU the chunk goes through cuDNN.
    """
    # Every method reads the same rows: those that a cache stores.
    key, value = round_to_bfloat16(key), round_to_bfloat16(value)
    restored = None if recipes is None else restore_rows(key, value, recipes)
    stored = write_rows(stored, start, key, value, restored)
    tokens, window = query.shape[1], config.layer_windows[layer]
    if flash_rows.serves(query, window, config.attention_softcap):
        part = flash_rows.attend_chunk(
            query,
            stored,
            start,
            config=config.cache_config(),
            softmax_scale=config.attention_scale,
            measure_coded=measure_coded,
        )
        return part, stored
    part = attend_rows(
        query,
        stored,
        start + jnp.arange(tokens),
        start + tokens,
        config=config.cache_config(),
        softmax_scale=config.attention_scale,
        sliding_window=window,
        softcap=config.attention_softcap,
        measure_coded=measure_coded,
    )
    return part, stored


def compare_distributions(log_q: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Negative log-likelihood, KL(first || each) in nats, and equality of the argmax with the first.

    log_q float32 [M, R, V] log-probabilities, the first of M is the reference; targets int32 [R]. Returns
    float32, float32, bool [M, R].
    """
    reference = log_q[:1]
    nll = -jnp.take_along_axis(log_q, targets[None, :, None], axis=-1)[..., 0]
    kl = jnp.sum(jnp.exp(reference) * (reference - log_q), axis=-1)
    return nll, kl, jnp.argmax(reference, axis=-1) == jnp.argmax(log_q, axis=-1)


def recipes_of(methods: Sequence[Method], layers: Sequence[int]) -> dict[int, tuple[Recipe, ...]]:
    """Layer -> one recipe per method, None where it is exact; layers that nobody quantizes are left out."""
    found = {layer: tuple(method.rotations.get(layer) for method in methods) for layer in layers}
    return {layer: recipes for layer, recipes in found.items() if any(r is not None for r in recipes)}


def layer_error(
    query: Any,
    positions: Any,
    key: jax.Array,
    value: jax.Array,
    rotation: Any,
    config: ModelConfig,
    layer: int,
) -> dict[str, float]:
    """Attention KL and relative output error of one layer on exact inputs, means over heads.

    query [T, N, D] at `positions` [T], NumPy or JAX; key, value [S, K, D] exact; rotation a Recipe.
    """
    if not len(positions):
        return {"kl": 0.0, "output_error": 0.0, "value_error": 0.0}
    errors = _layer_error(
        jnp.asarray(query),
        jnp.asarray(positions),
        key,
        value,
        rotation,
        geometry=config.cache_config(),
        softmax_scale=config.attention_scale,
        sliding_window=config.layer_windows[layer],
        softcap=config.attention_softcap,
    )
    return {name: float(host_array(values).mean()) for name, values in errors.items()}


@compiled_quickly(static_argnames=("geometry", "softmax_scale", "sliding_window", "softcap"))
def _layer_error(query, positions, key, value, rotation, **options):
    return fidelity.attention_error(query, positions, key, value, *_restore(key, value, rotation), **options)


def method_bytes(method: Method, tokens: int, config: ModelConfig, layers: Sequence[int]) -> dict[str, int]:
    """Bytes of a cache of `tokens` tokens: of the quantized `layers`, of all layers, and of all in BF16.

    INT2: whole pages, as `cache.live_bytes` counts them. Simulated recipes: history at `method.bits` per
    element. BF16 layers with a window hold that many tokens; linear layers have no cache.
    """
    geometry = config.cache_config()
    totals = {"quantized_layers": 0, "all_layers": 0, "all_layers_bf16": 0}
    row = 4 * geometry.num_key_value_heads * geometry.head_dim  # bytes of a BF16 key and value
    for layer in config.attention_layers:
        window = config.layer_windows[layer]
        dense = row * min(tokens, tokens if window is None or layer in layers else window)
        live = dense
        if layer in method.rotations:
            live = _quantized_bytes(method, tokens, geometry)
        totals["quantized_layers"] += live if layer in layers else 0
        totals["all_layers"] += live
        totals["all_layers_bf16"] += dense
    return totals


def _quantized_bytes(method: Method, tokens: int, geometry: CacheConfig) -> int:
    pages = geometry.history_pages(tokens)
    heads, head_dim = geometry.num_key_value_heads, geometry.head_dim
    if method.kind == "int2":
        window_pages = -(-tokens // fmt.PAGE_TOKENS) - pages
        return heads * (
            pages * fmt.int2_page_bytes(head_dim) + window_pages * fmt.window_page_bytes(head_dim)
        )
    history = fmt.PAGE_TOKENS * pages
    elements = 2 * heads * head_dim  # of a token
    return round(history * elements * method.bits / 8) + 2 * elements * (tokens - history)
