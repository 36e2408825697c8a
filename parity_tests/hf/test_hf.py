"""transformers on 2-bit pages: generation against oracles, cache surgery, refusals, calibration.

Models are tiny and random; every oracle is built from something else than the code under test: a DynamicCache
whose stored rows are rounded to bf16, `cache.attend` on a cache with its own pages, or the definitions in
float64. Numbers in brackets are field failures of the design notes' list.
"""

import copy
import dataclasses
import inspect
import pathlib
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from oscar_torch.cache import allocate_layer_cache  # noqa: E402
from oscar_torch.cache import attend as attend_paged  # noqa: E402
from oscar_torch.calibration import covariance  # noqa: E402
from oscar_torch.core import cache_format as fmt  # noqa: E402
from oscar_torch.core.config import CacheConfig  # noqa: E402
from oscar_torch.core.errors import CacheFullError, CheckpointError, ConfigError, OscarError, ShapeError  # noqa: E402
from oscar_torch.core.page_pool import QuantizedTokensError  # noqa: E402
from oscar_torch.core.rotation_header import RotationHeader  # noqa: E402
from oscar_torch.hf import cache as hf_cache  # noqa: E402
from oscar_torch.hf import calibrate, model_check  # noqa: E402
from oscar_torch.hf import layer as hf_layer  # noqa: E402
from oscar_torch.layer_cache import LayerCache  # noqa: E402
from oscar_torch.rotations.rotation import LayerRotation, RotationSet, identity_rotation  # noqa: E402
from oscar_torch.rotations.store import save_safetensors  # noqa: E402

pytestmark = pytest.mark.hf

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SLIDING = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": (tf.LlamaConfig, tf.LlamaForCausalLM, {}),
    "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM, {}),
    "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM, {"head_dim": 32}),
    "gemma3": (
        tf.Gemma3TextConfig,
        tf.Gemma3ForCausalLM,
        {"head_dim": 16, "query_pre_attn_scalar": 16, **SLIDING},
    ),
    "gpt_oss": (
        tf.GptOssConfig,
        tf.GptOssForCausalLM,
        {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, **SLIDING},
    ),
}
# Logits are of order 1 to 10; a row that rounds to the neighbouring bf16 number moves them by less than this.
TOLERANCE = {"atol": 2e-3, "rtol": 1e-3}
MODELS = ("llama", "qwen2", "qwen3", "gemma3")


def make_model(family, attention="oscar", **changes):
    config_class, model_class, options = FAMILIES[family]
    torch.manual_seed(1)
    model = model_class(config_class(**{**SMALL, **options, **changes})).eval()
    if family == "gpt_oss":  # sinks start at zero, which would hide their absence from every other layer
        for layer in model.model.layers:
            torch.nn.init.uniform_(layer.self_attn.sinks, 2.0, 6.0)
    if family == "gemma3":  # with norms at their initial zero every position predicts the same token
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.normal_(parameter, std=0.5)
    model.set_attn_implementation(attention)
    return model


def hadamard_layer(head_dim, heads=1):
    """A per-head rotation that needs no fit: Hadamard, with other signs for every head; exact in int16."""
    matrix = np.ones((1, 1))
    while len(matrix) < head_dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    generator = np.random.default_rng(head_dim)
    signs = np.where(generator.random((heads, head_dim)) < 0.5, -1.0, 1.0)
    rows = np.trunc(matrix * (1 << fmt.TRANSFORM_BITS) / np.sqrt(head_dim))  # column norms at most 1
    transform = (signs[:, :, None] * rows).astype(np.int16)
    exact = transform.astype(np.float64) / (1 << fmt.TRANSFORM_BITS)
    inverse = np.linalg.inv(exact)
    base = identity_rotation(heads, head_dim)
    return LayerRotation(
        key_transform=torch.from_numpy(transform),
        query_transform=torch.from_numpy(inverse.swapaxes(1, 2).astype(np.float32)),
        value_transform=torch.from_numpy(transform),
        output_transform=torch.from_numpy(inverse.astype(np.float32)),
        value_mean=base.value_mean,
        key_mean=base.key_mean,
        key_multiplier=base.key_multiplier,
        value_multiplier=base.value_multiplier,
    )


def make_rotations(config, *, model_id="tiny", layers=None, **changes):
    geometry = model_check.cache_config(config)
    layers = range(config.num_hidden_layers) if layers is None else layers
    fields = {
        "model_id": model_id,
        "layers": tuple(layers),
        "num_query_heads": geometry.num_query_heads,
        "num_key_value_heads": geometry.num_key_value_heads,
        "head_dim": geometry.head_dim,
        "rope": "half",
        "basis": "hadamard",
        "basis_version": "1",
    } | changes
    heads, head_dim = fields["num_key_value_heads"], fields["head_dim"]
    return RotationSet(
        RotationHeader(**fields), {i: hadamard_layer(head_dim, heads) for i in fields["layers"]}
    )


def make_cache(model, **options):
    return hf_cache.OscarCache(make_rotations(model.config), model.config, **options)


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 97, (1, n), generator=generator) for n in lengths]


def left_padded(rows):
    width = max(row.shape[1] for row in rows)
    ids, mask = torch.zeros(2, len(rows), width, dtype=torch.long)
    for b, row in enumerate(rows):
        ids[b, width - row.shape[1] :] = row[0]
        mask[b, width - row.shape[1] :] = 1
    return ids, mask


def with_cache(model, cache):
    """The keyword that takes the cache, which newer transformers versions renamed."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def generate(model, ids, cache, new=8, **options):
    options = {"do_sample": False, "max_new_tokens": new, "output_logits": True, **options}
    return model.generate(ids, return_dict_in_generate=True, **with_cache(model, cache), **options)


class RoundingCache(tf.DynamicCache):
    """The dense oracle: stored rows are bf16 numbers; a prompt sees its own rows as they are."""

    def update(self, key, value, layer_idx, *args, **kwargs):
        full = super().update(key.bfloat16().to(key.dtype), value.bfloat16().to(value.dtype), layer_idx)
        count = key.shape[2]
        if count == 1:
            return full
        return tuple(torch.cat([a[:, :, :-count], new], 2) for a, new in zip(full, (key, value)))


def stored(layer, sequence):
    """Every byte a sequence owns, physical page numbers aside: comparable between caches."""
    store, length = layer.store, layer.lengths[sequence]
    assert int(store.lengths[sequence]) == length
    if not isinstance(store, LayerCache):
        slots = store.key.shape[1]
        tokens = torch.arange(max(0, length - (layer.sliding_window or slots)), length)
        return [store.key[sequence, tokens % slots], store.value[sequence, tokens % slots]]
    pages = store.page_table[sequence, : int(store.history_pages[sequence])].tolist()
    assert 0 not in pages
    arrays = [getattr(store, name)[pages] for name in fmt.INT2_ARRAYS]
    config = layer.config
    tokens = torch.arange(length)
    page = tokens // 64
    history = len(pages)
    bf16 = (page < config.sink_pages) | (page >= config.sink_pages + history)
    page, row = page[bf16], tokens[bf16] % 64
    ring = config.sink_pages + (page - config.sink_pages) % config.recent_slots
    slot = torch.where(page < config.sink_pages, page, ring)
    physical = store.window_table[sequence, slot]
    assert (physical > 0).all()
    return [*arrays, store.window_key[physical, :, row], store.window_value[physical, :, row]]


def assert_same(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second):
        assert torch.equal(a, b)


# Generation.


@pytest.mark.parametrize("family", [*MODELS, "gpt_oss"])
def test_short_sequences_equal_the_dense_cache(family):
    """[22, 32] Below sink + recent nothing is quantized: same logits as a dense cache of bf16 rows."""
    (ids,) = prompts(70)
    # The eager attention is the one that every family supports, sinks included.
    dense = make_model(family, "eager")
    expected = generate(dense, ids, RoundingCache(config=dense.config), 12)
    model = make_model(family)
    before = copy.deepcopy(model.config.to_dict())
    found = generate(model, ids, make_cache(model), 12)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), **TOLERANCE)
    assert model.config.to_dict() == before  # [23]


def test_the_oracle_can_tell():
    """Sink logits left out must not pass the comparison above."""
    (ids,) = prompts(70)
    model = make_model("gpt_oss")
    expected = generate(model, ids, make_cache(model), 4)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-30.0)
    found = generate(model, ids, make_cache(model), 4)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), **TOLERANCE)


def test_long_sequences_equal_ops_on_other_pages(monkeypatch):
    """Past the windows every attention output and every page equals a replay through `ops` on owned pages."""
    calls, (ids,) = {}, prompts(600)
    attend = hf_layer.OscarLayer.attend

    def recorded(layer, query, key, value, real, **options):
        out = attend(layer, query, key, value, real, **options)
        calls.setdefault(layer.layer_id, []).append((query, key, value, options["scale"], out))
        return out

    monkeypatch.setattr(hf_layer.OscarLayer, "attend", recorded)
    model = make_model("llama")
    cache = make_cache(model)
    generate(model, ids, cache, 48)
    for layer in cache.layers:
        store = allocate_layer_cache(layer.config, 1, 1000)
        assert layer.lengths == [647] and layer.store.history_pages.tolist() == [5]  # [26]
        for query, key, value, scale, out in calls[layer.layer_id]:
            outputs = []
            for start in range(0, query.shape[1], 512):
                piece = slice(start, start + 512)
                new = torch.tensor([query[:, piece].shape[1]], dtype=torch.int32)
                o, store = attend_paged(
                    query[:, piece], key[:, piece], value[:, piece], store, layer.rotation,
                    new_lengths=new, scale=scale,
                )  # fmt: skip
                outputs.append(o)
            # The pieces differ in the number of empty table columns, which BLAS may sum in another order.
            torch.testing.assert_close(torch.cat(outputs, 1), out, atol=1e-5, rtol=1e-5)
        replay = layer.copy()
        replay.store = store
        assert_same(stored(layer, 0), stored(replay, 0))


@pytest.mark.parametrize("family", MODELS)
def test_left_padded_batch_equals_single_runs(family):
    """[3, 19] Ragged prompts in one batch give the tokens of batch-1 runs; padding is not stored."""
    model = make_model(family)
    rows = prompts(1, 7, 64, 65, 320, 321, 450)
    ids, mask = left_padded(rows)
    cache = make_cache(model)
    batch = generate(model, ids, cache, 6, attention_mask=mask)
    int2 = [layer for layer in cache.layers if isinstance(layer.store, LayerCache)]
    assert int2[0].lengths == [row.shape[1] + 5 for row in rows]
    assert int2[0].store.history_pages.tolist() == [0, 0, 0, 0, 0, 0, 2]
    assert not int2[0].store.window_key[0].any() and not int2[0].store.key_codes[0].any()
    for b, row in enumerate(rows):
        alone = generate(model, row, make_cache(model), 6)
        assert torch.equal(alone.sequences[0, -6:], batch.sequences[b, -6:]), row.shape
        together, single = torch.stack(batch.logits)[:, b], torch.stack(alone.logits)[:, 0]
        # Matrix products of other shapes round otherwise; a bf16 row may then fall on the other side.
        torch.testing.assert_close(together, single, atol=0.05, rtol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, "triton"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_kernels_on_the_gpu_equal_the_reference_there(family, implementation):
    """A ragged batch through the kernels and through plain Torch: same logits, same bytes.

    With one layer, because a second one would quantize what two attention kernels rounded differently.
    """
    changes: dict[str, Any] = {"num_hidden_layers": 1, "head_dim": 64}
    if family == "gpt_oss":  # attention sinks
        changes["layer_types"] = ["full_attention"]
    model = make_model(family, **changes).to("cuda")
    ids, mask = (x.to("cuda") for x in left_padded(prompts(70, 450)))
    tokens = prompts(70, 70, seed=1)  # the same for both: greedy choices would part at the first near tie
    forced = {"prefix_allowed_tokens_fn": lambda b, row: [int(tokens[b][0, len(row) - ids.shape[1]])]}
    logits, caches = [], []
    for name in ("eager", implementation):
        caches.append(make_cache(model, implementation=name))
        run = generate(model, ids, caches[-1], 70, attention_mask=mask, **forced)  # past a flush
        logits.append(torch.stack(run.logits))
    # Attention may differ by 3e-3 (`test_triton.py`), logits are up to ten times as large as what it adds.
    torch.testing.assert_close(logits[1], logits[0], atol=0.05, rtol=0.01)
    (first,), (second,) = (cache.layers for cache in caches)
    assert first.store.history_pages.tolist() == [0, 3]
    for b in range(2):
        assert_same(stored(first, b), stored(second, b))


def test_a_neighbour_changes_no_byte():
    """[21] Same shapes, another prompt in row 1: the pages of row 0 are the same."""
    model = make_model("llama")
    mine, other, another = prompts(450, 430, 430)
    caches = []
    for neighbour in (other, another):
        ids, mask = left_padded([mine, neighbour])
        caches.append(make_cache(model))
        generate(model, ids, caches[-1], 3, attention_mask=mask)
    for first, second in zip(caches[0].layers, caches[1].layers):
        assert_same(stored(first, 0), stored(second, 0))
        assert not torch.equal(stored(first, 1)[0], stored(second, 1)[0])


def test_sampling_equals_the_dense_cache():
    (ids,) = prompts(40)
    dense, model = make_model("qwen3", "eager"), make_model("qwen3")
    tokens = []
    for m, cache in ((dense, RoundingCache(config=dense.config)), (model, make_cache(model))):
        torch.manual_seed(3)
        tokens.append(generate(m, ids, cache, 10, do_sample=True, temperature=2.0).sequences)
    assert torch.equal(*tokens)


def test_beam_search_equals_the_dense_cache():
    """[23] Short beams against the dense oracle, with padding."""
    ids, mask = left_padded(prompts(40, 23))
    dense, model = make_model("llama", "eager"), make_model("llama")
    options = {"num_beams": 3, "attention_mask": mask, "num_return_sequences": 3}
    expected = generate(dense, ids, RoundingCache(config=dense.config), 8, **options)
    found = generate(model, ids, make_cache(model), 8, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-3, rtol=1e-3)


def test_long_beams_equal_beams_on_copied_pages(monkeypatch):
    """Beams over shared INT2 pages, across a flush, against a cache that copies whole sequences."""
    (ids,) = prompts(440)
    model = make_model("llama")

    def run():
        return generate(model, ids, make_cache(model), 12, num_beams=3, num_return_sequences=3)

    found = run()

    def copying(layer, indices):
        chosen, old = indices.tolist(), layer.copy()
        store = allocate_layer_cache(layer.config, len(chosen), 1000)
        for b, source in enumerate(chosen):
            for table, names in (("page_table", fmt.INT2_ARRAYS), ("window_table", fmt.WINDOW_ARRAYS)):
                for target, page in zip(
                    getattr(store, table)[b].tolist(), getattr(old.store, table)[source].tolist()
                ):
                    for name in names:
                        getattr(store, name)[target] = getattr(old.store, name)[page]
        store.lengths = old.store.lengths[chosen].clone()
        store.history_pages = old.store.history_pages[chosen].clone()
        layer.store = store
        layer.lengths = [old.lengths[b] for b in chosen]
        layer.reached = [old.reached[b] for b in chosen]

    monkeypatch.setattr(hf_layer.OscarLayer, "select", copying)
    expected = run()
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=1e-5)


def test_several_turns_equal_the_dense_cache():
    """[1] Turn after turn on one padded cache, rows of different lengths, against the dense oracle."""
    dense, model = make_model("gemma3", "eager"), make_model("gemma3")
    results = []
    for m, cache in ((dense, RoundingCache(config=dense.config)), (model, make_cache(model))):
        ids, mask = left_padded(prompts(50, 31))
        for turn in range(3):
            ids = generate(m, ids, cache, 5, attention_mask=mask).sequences
            more, more_mask = left_padded(prompts(9, 20 - turn, seed=turn))
            mask = torch.cat([mask, torch.ones(2, 5, dtype=torch.long), more_mask], 1)
            ids = torch.cat([ids, more], 1)
        results.append(ids)
    assert torch.equal(*results)


def test_shared_prefix_equals_unshared():
    """[1, 24, 29] A prefix prefilled once: its continuations, alone and batched, ≡ from scratch."""
    model = make_model("qwen3")
    prefix, first, second = prompts(hf_layer.PREFILL_CHUNK, 90, 33)
    base = make_cache(model)
    with torch.no_grad():
        model(prefix, use_cache=True, **with_cache(model, base))
    kept = [stored(layer, 0) for layer in base.layers]
    wholes = [torch.cat([prefix, part], 1) for part in (first, second)]
    unshared = [generate(model, ids, make_cache(model), 6).sequences for ids in wholes]
    for ids, expected in zip(wholes, unshared):
        branch = copy.deepcopy(base)
        assert torch.equal(generate(model, ids, branch, 6).sequences, expected)
    for layer, before in zip(base.layers, kept):
        assert_same(stored(layer, 0), before)
    # Both at once: the prefix repeated (its INT2 pages shared), the rest padded between prefix and turn.
    base.batch_repeat_interleave(2)
    assert base.layers[0].store.page_table[0, :3].tolist() == base.layers[0].store.page_table[1, :3].tolist()
    more, more_mask = left_padded([first, second])
    ids = torch.cat([prefix.expand(2, -1), more], 1)
    mask = torch.cat([torch.ones(2, prefix.shape[1], dtype=torch.long), more_mask], 1)
    batch = generate(model, ids, base, 6, attention_mask=mask).sequences
    for b, expected in enumerate(unshared):
        assert torch.equal(batch[b, -6:], expected[0, -6:])


def test_removing_the_longest_row():
    """[25] The rows that stay continue as if they had been alone."""
    model = make_model("gemma3")
    rows = prompts(450, 100, 33)
    ids, mask = left_padded(rows)
    cache = make_cache(model)
    first = generate(model, ids, cache, 4, attention_mask=mask).sequences
    cache.batch_select_indices(torch.tensor([2, 1]))
    assert cache.batch_size == 2 and cache.layers[1].lengths == [36, 103]
    ids = first[[2, 1]]
    mask = torch.cat([mask[[2, 1]], torch.ones(2, 4, dtype=torch.long)], 1)
    more = generate(model, ids, cache, 4, attention_mask=mask).sequences
    for b, row in enumerate((rows[2], rows[1])):
        alone = generate(model, row, make_cache(model), 8).sequences
        assert torch.equal(more[b, -8:], alone[0, -8:])


def test_prompt_lookup_decoding_rolls_back():
    """[10] Drafts are appended and taken back: short ≡ greedy, and across a page flush nothing is refused."""
    model = make_model("llama", tie_word_embeddings=True)
    (short,) = prompts(12)
    short = short.repeat(1, 4)
    greedy = generate(model, short, make_cache(model), 30).sequences
    drafted = generate(model, short, make_cache(model), 30, prompt_lookup_num_tokens=3, output_logits=False)
    assert torch.equal(drafted.sequences, greedy)
    long = short[:, :12].repeat(1, 31)  # 372 tokens: the first flush comes while drafting
    cache = make_cache(model)
    out = generate(model, long, cache, 30, prompt_lookup_num_tokens=3, output_logits=False)
    length = out.sequences.shape[1] - 1
    assert cache.get_seq_length() == length and cache.layers[0].lengths == [length]
    assert cache.layers[0].store.history_pages.tolist() == [1]


def test_output_has_the_querys_dtype():
    model = make_model("llama").to(torch.bfloat16)
    (ids,) = prompts(400)
    cache = make_cache(model)
    found = generate(model, ids, cache, 3)
    assert found.logits[0].dtype in (torch.bfloat16, torch.float32)
    with torch.no_grad():
        hidden = model.model(ids[:, :5], use_cache=True, **with_cache(model, make_cache(model)))
    assert hidden.last_hidden_state.dtype == torch.bfloat16


def test_torch_compile_with_graph_breaks():
    """Attention runs outside the graphs, the rest inside; transformers is told not to compile decoding."""
    model = make_model("llama", num_hidden_layers=1)
    (ids,) = prompts(400)
    compiled = torch.compile(model.model, backend="eager", dynamic=True)
    caches, outputs = [make_cache(model) for _ in range(2)], []
    assert not caches[0].is_compileable
    with torch.no_grad():
        for run, cache in zip((model.model, compiled), caches):
            for part in (ids[:, :398], ids[:, 398:]):
                outputs.append(run(part, use_cache=True, **with_cache(model, cache)).last_hidden_state)
    torch.testing.assert_close(outputs[:2], outputs[2:], atol=1e-4, rtol=1e-4)
    assert caches[1].layers[0].lengths == [400]


def test_the_documented_example_runs(tmp_path):
    """The first Python block of docs/transformers.md, as it stands there."""
    model = make_model("llama", "sdpa")
    model.save_pretrained(tmp_path)
    save_safetensors(make_rotations(model.config), tmp_path / "rotations.safetensors")
    page = pathlib.Path(__file__).parents[2] / "docs" / "transformers.md"
    example = page.read_text().split("```python\n")[1].split("```")[0]
    assert len(example.strip().splitlines()) == 5
    (ids,) = prompts(390)
    variables = {
        "name": str(tmp_path),
        "rotations": str(tmp_path / "rotations.safetensors"),
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
    }
    exec(example, variables)
    assert variables["output"].shape == (1, 390 + 16)
    assert variables["cache"].layers[0].store.history_pages.tolist() == [1]


# One layer, fed with rows.

GEOMETRY = CacheConfig(num_key_value_heads=2, num_query_heads=4, head_dim=16)


def make_layer(window=None, **options) -> Any:
    rotation = None if window else hadamard_layer(16, 2)
    return hf_layer.OscarLayer(0, GEOMETRY, rotation, sliding_window=window, **options)


def feed(layer, rows, real=None):
    """Appends rows float32 [B, T, 16 channels] as queries, keys and values of every head."""
    query = rows[:, :, None].expand(-1, -1, 4, -1)
    key = rows[:, :, None].expand(-1, -1, 2, -1)
    return layer.attend(query, key, -key, real, scale=0.25)


def random_rows(batch, tokens, seed=0):
    return torch.randn(batch, tokens, 16, generator=torch.Generator().manual_seed(seed))


def test_a_piece_of_one_token_is_no_decoding_step():
    """[19] From 511 tokens a turn's first piece is one token, which completes a page: alone ≡ in a batch."""
    first, turn = random_rows(2, 511), random_rows(2, 9, seed=1)
    alone, batch = make_layer(), make_layer()
    feed(alone, first[:1])
    expected = feed(alone, turn[:1])
    real = torch.ones(2, 511, dtype=torch.bool)
    real[1, :300] = False
    feed(batch, first, real)
    torch.testing.assert_close(feed(batch, turn)[:1], expected, atol=1e-5, rtol=1e-5)
    assert_same(stored(alone, 0), stored(batch, 0))


@pytest.mark.parametrize("window", [None, 100])
def test_select_then_append_equals_sequences_alone(window):
    """[23, 24] Repeat, reorder and select, then different rows for everyone: no page is shared by mistake."""
    starts = [random_rows(1, n, seed=n) for n in (330, 520, 70)]
    layer, width = make_layer(window), 520
    batch, real = torch.zeros(3, width, 16), torch.zeros(3, width, dtype=torch.bool)
    for b, rows in enumerate(starts):
        batch[b, width - rows.shape[1] :] = rows[0]
        real[b, width - rows.shape[1] :] = True
    feed(layer, batch, real)
    parents = [0, 1, 2]
    layer.batch_repeat_interleave(2)
    parents = [p for p in parents for _ in range(2)]
    layer.reorder_cache(torch.tensor([3, 3, 1, 5, 2, 0]))
    parents = [parents[i] for i in (3, 3, 1, 5, 2, 0)]
    layer.batch_select_indices(torch.tensor([True, True, True, True, True, False]))
    parents = parents[:5]
    more = random_rows(5, 140, seed=9)
    outputs = [feed(layer, more[:, i : i + 70]) for i in (0, 70)]
    for b, parent in enumerate(parents):
        alone = make_layer(window)
        feed(alone, starts[parent])
        expected = [feed(alone, more[b : b + 1, i : i + 70]) for i in (0, 70)]
        assert_same(stored(layer, b), stored(alone, 0))
        for o, e in zip(outputs, expected):
            torch.testing.assert_close(o[b : b + 1], e, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("length", "draft"), [(5, 40), (200, 40), (300, 83), (400, 47)])
def test_crop_is_as_if_never_appended(window, length, draft):
    """[10, 23] Within the recent part (and a ring's slack) cropped rows leave no trace in what follows."""
    layer, expected = make_layer(window), make_layer(window)
    rows, more = random_rows(2, length), random_rows(2, 200, seed=2)
    feed(layer, rows)
    feed(expected, rows)
    if window:
        draft = min(draft, 60)
    feed(layer, random_rows(2, draft, seed=1))
    layer.crop(-draft)
    assert layer.lengths == expected.lengths and layer.get_seq_length() == expected.get_seq_length()
    for b in range(2):
        assert_same(stored(layer, b), stored(expected, b))
    assert torch.equal(feed(layer, more), feed(expected, more))
    for b in range(2):
        assert_same(stored(layer, b), stored(expected, b))


def test_crop_past_a_page_is_refused_and_changes_nothing():
    """[10] The named refusal, in all layers or none; a recorded draft may cross a page."""
    layer = make_layer()
    feed(layer, random_rows(2, 383))
    feed(layer, random_rows(2, 4, seed=1))
    before = [stored(layer, b) for b in range(2)]
    with pytest.raises(QuantizedTokensError, match=r"from 387 to 383 tokens: tokens 64\.\.127 are quantized"):
        layer.crop(-4)
    for b in range(2):
        assert_same(stored(layer, b), before[b])
    layer.crop(-3)  # 384 tokens have that page quantized too
    assert layer.lengths == [384, 384]
    layer.crop(64)  # the older meaning: keep 64 columns; the sink is BF16, so this is exact
    assert layer.lengths == [64, 64] and layer.store.history_pages.tolist() == [0, 0]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kept", [0, 1, 5, 9])
def test_recorded_rows_are_taken_back_across_a_page(window, kept):
    layer, expected = make_layer(window), make_layer(window)
    rows, draft = random_rows(2, 380), random_rows(2, 9, seed=1)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :3] = False
    feed(layer, rows)
    feed(expected, rows)
    layer.activate_past_recording()
    for step in (slice(0, 6), slice(6, 9)):
        feed(layer, draft[:, step], real[:, step])
    layer.crop(-(9 - kept))
    if kept:
        feed(expected, draft[:, :kept], real[:, :kept])
    assert layer.lengths == expected.lengths == [380 + kept, 380 + max(0, kept - 3)]
    for b in range(2):
        assert_same(stored(layer, b), stored(expected, b))
    assert torch.equal(feed(layer, random_rows(2, 70, seed=2)), feed(expected, random_rows(2, 70, seed=2)))


def test_a_ring_refuses_what_it_no_longer_has():
    layer = make_layer(window=100)
    feed(layer, random_rows(1, 400))
    slack = layer.store.key.shape[1] - 100
    layer.crop(-slack)
    with pytest.raises(QuantizedTokensError, match="its ring goes back to token"):
        layer.crop(-2)
    assert layer.lengths == [400 - slack]


def test_growing_equals_preallocated_and_full_is_an_error():
    """[26] Pools that grow page by page hold the bytes of one allocated at once; the limit is a limit."""
    grown, fixed = make_layer(), make_layer(max_length=700)
    rows = random_rows(2, 700)
    for start in range(0, 700, 50):
        feed(grown, rows[:, start : start + 50])
    feed(fixed, rows)
    for b in range(2):
        assert_same(stored(grown, b), stored(fixed, b))
    assert fixed.get_max_length() == 700 and grown.get_max_length() == -1
    before = stored(fixed, 0)
    with pytest.raises(CacheFullError, match="701 tokens, max_length = 700"):
        feed(fixed, rows[:, :1])
    assert_same(stored(fixed, 0), before)
    assert grown.store.key_codes.shape[0] <= 1 + 2 * (5 + hf_layer.GROW_PAGES)
    grown.reset()
    assert grown.get_seq_length() == 0 and grown.store is None
    feed(grown, rows[:1])
    assert_same(stored(grown, 0), stored(fixed, 0))


def test_memory_is_the_formulas():
    """[21] Bytes in use within 1 % of the format page's formula; bytes allocated within 1 % of those."""
    tokens, heads, head_dim = 2047, 2, 16  # a length that fills every BF16 page but for one row
    layer = make_layer(max_length=tokens)
    feed(layer, random_rows(2, tokens))
    pages = (tokens - 320) // 64
    windows = -(-tokens // 64) - pages
    formula = 2 * heads * (pages * (34 * head_dim + 256) + windows * 256 * head_dim)
    model = hf_cache.OscarCache.__new__(hf_cache.OscarCache)
    model.layers = [layer]
    live = model.live_bytes()
    assert abs(live["total"] - formula) <= 0.01 * formula
    arrays = [a for a in vars(layer.store).values() if isinstance(a, torch.Tensor)]
    in_memory = sum(a.untyped_storage().nbytes() for a in arrays)
    reserved = heads * ((34 * head_dim + 256) + 256 * head_dim)  # page 0 of either kind
    assert abs(in_memory - reserved - formula) <= 0.01 * formula
    # At head_dim 16 an INT2 page is 5.12 times smaller than in BF16; at this length the windows weigh much.
    assert live["bfloat16"] / live["total"] > 2.5


# Refusals: one line, by name, before anything is allocated.


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tf.T5Config(), "encoder-decoder"),
        (tf.DeepseekV3Config(), "kv_lora_rank = 512"),
        (tf.Gemma2Config(), "attn_logit_softcapping = 50.0"),
        (tf.Qwen3NextConfig(), "layer 0 is 'linear_attention'"),
        (tf.JambaConfig(), "layer 0 is '(linear_attention|mamba)'"),
        (tf.Gemma3nTextConfig(), "share another layer's keys and values"),
        (tf.Llama4TextConfig(), "layer 0 is 'chunked_attention'"),
        (tf.LlamaConfig(**SMALL, head_dim=24), "head_dim = 24"),
    ],
)
def test_models_that_cannot_be_served_are_refused(config, message):
    """[7, 8, 9, 12, 30]"""
    rotations = make_rotations(tf.LlamaConfig(**SMALL))
    with pytest.raises(ConfigError, match=message) as error:
        hf_cache.OscarCache(rotations, config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_query_heads": 8}, "num_query_heads = 8, the model has 4"),
        ({"num_key_value_heads": 4}, "num_key_value_heads = 4, the model has 2"),
        ({"head_dim": 32}, "head_dim = 32, the model has 16"),
        ({"layers": (0,)}, "no layer 1"),
        ({"model_id": "other/Model-8B"}, "of model 'other/Model-8B', this is 'some/Model-4B'"),
    ],
)
def test_rotations_of_another_model_are_refused(changes, message):
    """[16]"""
    config = tf.LlamaConfig(**SMALL)
    config._name_or_path = "some/Model-4B"
    with pytest.raises(CheckpointError, match=message):
        hf_cache.OscarCache(make_rotations(config, **({"model_id": "some/Model-4B"} | changes)), config)
    hf_cache.OscarCache(make_rotations(config, model_id="a-copy/model-4b"), config)
    hf_cache.OscarCache(make_rotations(config, model_id="x"), config, model_id="x")


def test_misuse_is_refused():
    (ids,) = prompts(10)
    model = make_model("llama")
    with pytest.raises(ConfigError, match="found no OscarCache"):
        model.generate(ids, max_new_tokens=2)
    cache = make_cache(model)
    generate(model, ids, cache, 2)
    with pytest.raises(ShapeError, match="a batch of 2 for a cache of 1"):
        model(ids.expand(2, -1), use_cache=True, **with_cache(model, cache))
    with pytest.raises(ShapeError, match="mask of 4 columns, expected 15"):
        short_mask = torch.ones(1, 4)
        model(ids[:, :4], attention_mask=short_mask, use_cache=True, **with_cache(model, cache))
    with pytest.raises(ShapeError, match="attention mask"):
        mask = torch.zeros(1, 1, 4, 15)
        model(ids[:, :4], attention_mask=mask, use_cache=True, **with_cache(model, cache))
    assert cache.get_seq_length() == 11 and cache.layers[0].lengths == [11]
    with pytest.raises(ConfigError, match=r"model\.training = True"):
        model.train()
        model(ids, use_cache=True, **with_cache(model, make_cache(model)))
    model.eval()
    model.set_attn_implementation("sdpa")
    with pytest.raises(
        ConfigError, match="attn_implementation = 'sdpa', allowed with an OscarCache: 'oscar'"
    ):
        generate(model, ids, make_cache(model), 2)
    for options in ({"prefill_chunk": 100}, {"max_length": 0}, {"recent_tokens": 100}):
        with pytest.raises(ConfigError):
            make_cache(model, **options)
    with pytest.raises(OscarError, match="offloading"):
        cache.offload(0, only_non_sliding=False)


# Calibration.


def float64_statistics(rows, metric, skip):
    """The definitions of covariance.py, written out per head for a list of sequences (q, k, v, o)."""
    heads = rows[0][1].shape[1]
    group = rows[0][0].shape[1] // heads
    result = {}
    for head in range(heads):
        part = slice(head * group, (head + 1) * group)
        q = np.concatenate([r[0][:, part].reshape(-1, r[0].shape[-1]) for r in rows])
        o = np.concatenate([r[3][:, part].reshape(-1, r[0].shape[-1]) for r in rows])
        pages = np.concatenate(
            [r[1][skip : len(r[1]) // 64 * 64, head].reshape(-1, 64, q.shape[-1]) for r in rows]
        )
        centered = (pages - pages.mean(axis=1, keepdims=True)).reshape(-1, q.shape[-1])
        k, v = (np.concatenate([r[i][skip:, head] for r in rows]) for i in (1, 2))
        # The first fifth of the sequences (one, here) sets the metric and is not weighed by it.
        kw, vw = (np.concatenate([r[i][skip:, head] for r in rows[1:]]) for i in (1, 2))
        weight = np.einsum("td,de,te->t", kw, metric[head], kw)
        for name, value in {
            "query_covariance": q.T @ q / len(q),
            "exact_value_covariance": o.T @ o / len(o),
            "key_covariance": centered.T @ centered / len(centered),
            "key_mean": k.mean(axis=0),
            "value_mean": v.mean(axis=0),
            "value_covariance": np.cov(v.T, bias=True),
            "surrogate_value_covariance": np.einsum("t,td,te->de", weight, vw, vw) / weight.sum(),
        }.items():
            result.setdefault(name, []).append(value)
    return {name: np.stack(value) for name, value in result.items()}


def test_calibration_equals_float64(monkeypatch, tmp_path):
    """[20] Statistics of what the attention layers really saw; the model is left as it was."""
    seen = {}
    update = covariance.update_statistics

    def recorded(state, *rows):
        seen.setdefault(id(state), []).append([r.double().numpy() for r in rows])
        return update(state, *rows)

    monkeypatch.setattr(covariance, "update_statistics", recorded)
    model = make_model("llama", "sdpa")
    before = copy.deepcopy(model.config.to_dict())
    batches = [torch.cat(prompts(230, 230)), prompts(150)[0][0]]
    statistics = calibrate.calibrate_model(model, batches)
    assert model.config.to_dict() == before and model.config._attn_implementation == "sdpa"
    assert list(statistics) == [0, 1] and len(seen) == 2
    for entry, rows in zip(statistics.values(), seen.values()):
        first = rows[0][0]
        grouped = first.reshape(len(first), 2, 2, 16).transpose(1, 0, 2, 3).reshape(2, -1, 16)
        metric = np.einsum("krd,kre->kde", grouped, grouped) / grouped.shape[1]
        assert entry.tokens == 2 * (230 - 64) + 150 - 64
        for name, expected in float64_statistics(rows, metric, 64).items():
            np.testing.assert_allclose(getattr(entry, name), expected, rtol=1e-9, atol=1e-12, err_msg=name)
    # The rows are the model's own: its dense attention reproduces the outputs.
    q, k, v, o = next(iter(seen.values()))[0]
    scores = np.einsum("tkgd,skd->kgts", q.reshape(-1, 2, 2, 16), k) / 4
    scores[..., np.triu(np.ones((230, 230), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    dense = np.einsum("kgts,skd->tkgd", weights / weights.sum(-1, keepdims=True), v).reshape(o.shape)
    np.testing.assert_allclose(o, dense, atol=1e-4)

    path = tmp_path / "statistics.safetensors"
    covariance.save_statistics(statistics, path)
    with pytest.raises(ConfigError, match="token_batches is empty"):
        calibrate.calibrate_model(model, [])


def test_from_transformers_to_a_fitted_cache(tmp_path):
    """Statistics gathered here, fitted by oscar_jax, applied here: the whole road, through files."""
    pytest.importorskip("jax")
    from oscar_jax.calibration import covariance as jax_covariance
    from oscar_jax.calibration import statistics as jax_statistics
    from oscar_jax.core import rotation_header as jax_rotation_header
    from oscar_jax.rotations import fit as jax_fit
    from oscar_jax.rotations import rotation as jax_rotation
    from oscar_jax.rotations import store as jax_checkpoint

    model = make_model("qwen3")
    statistics = calibrate.calibrate_model(model, prompts(320, 320, 200))
    covariance.save_statistics(statistics, tmp_path / "statistics.safetensors")
    loaded = jax_statistics.load_statistics(tmp_path / "statistics.safetensors")
    assert [f.name for f in dataclasses.fields(covariance.LayerStatistics)] == [
        f.name for f in dataclasses.fields(jax_covariance.LayerStatistics)
    ]
    header = make_rotations(model.config).header
    fitted = jax_rotation.RotationSet(
        jax_rotation_header.RotationHeader(**vars(header)),
        {i: jax_fit.fit_layer_rotation(s, "channel_balanced", per_head=True, damping=0.01)
         for i, s in loaded.items()},
    )  # fmt: skip
    jax_checkpoint.save_safetensors(fitted, tmp_path / "rotations.safetensors")
    (ids,) = prompts(400)
    cache = hf_cache.OscarCache(tmp_path / "rotations.safetensors", model.config)
    assert generate(model, ids, cache, 3).sequences.shape == (1, 403)
    assert cache.layers[0].store.history_pages.tolist() == [1]


def test_statistics_are_those_of_the_jax_twin():
    pytest.importorskip("jax")
    from oscar_jax.calibration import covariance as jax_covariance

    generator = np.random.default_rng(0)
    rows = [generator.standard_normal((300, n, 32)).astype(np.float32) for n in (6, 2, 2, 6)]
    results = []
    for package, convert in ((covariance, torch.from_numpy), (jax_covariance, np.asarray)):
        halves = [[convert(r[start : start + 150]) for r in rows] for start in (0, 150)]
        metric = package.init_statistics(2, 32)
        metric = package.fix_surrogate_metric(package.update_statistics(metric, *halves[0]))
        state, other = (
            dataclasses.replace(
                package.init_statistics(2, 32, skip_tokens=64), surrogate_metric=metric.surrogate_metric
            )
            for _ in range(2)
        )
        for half in halves:
            state = package.update_statistics(state, *half)
        other = package.update_statistics(package.start_sequence(other, 64), *halves[1])
        results.append(package.finalize_statistics(package.merge_statistics(state, other)))
    assert results[0].tokens == results[1].tokens == 300 - 64 + 150
    for name, value in vars(results[0]).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_allclose(value, getattr(results[1], name), rtol=2e-5, atol=2e-6, err_msg=name)
