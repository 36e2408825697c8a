"""Generation on 2-bit pages against dense oracles: families, padding, sampling, beams, dtypes."""

import copy
import pathlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from oscar_torch.cache import allocate_layer_cache  # noqa: E402
from oscar_torch.cache import attend as attend_paged  # noqa: E402
from oscar_torch.core import cache_format as fmt  # noqa: E402
from oscar_torch.hf import layer as hf_layer  # noqa: E402
from oscar_torch.hf.held_pages import HeldPages  # noqa: E402
from oscar_torch.layer_cache import LayerCache  # noqa: E402
from oscar_torch.rotations.store import save_safetensors  # noqa: E402
from parity_tests.hf.tiny import (  # noqa: E402
    MODELS,
    TOLERANCE,
    RoundingCache,
    assert_same,
    generate,
    left_padded,
    make_cache,
    make_model,
    make_rotations,
    prompts,
    stored,
    with_cache,
)

pytestmark = pytest.mark.hf


@pytest.mark.parametrize("family", [*MODELS, "gemma2", "gpt_oss"])
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


def test_the_oracle_sees_a_soft_cap():
    """A cap left out must not pass the comparison above."""
    (ids,) = prompts(70)
    with torch.no_grad():
        capped, free = (
            make_model("gemma2", attn_logit_softcapping=cap)(ids, use_cache=False).logits
            for cap in (0.5, None)
        )
    with pytest.raises(AssertionError):
        torch.testing.assert_close(capped, free, **TOLERANCE)


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
        calls.setdefault(layer.layer_id, []).append((query, key, value, options["softmax_scale"], out))
        return out

    monkeypatch.setattr(hf_layer.OscarLayer, "attend", recorded)
    model = make_model("llama")
    cache = make_cache(model, prefill_chunk=512)
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
                    new_lengths=new, softmax_scale=scale,
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
        history = old.store.history_pages[chosen].tolist()
        pages = HeldPages(len(chosen), store.key_codes.shape[0] - 1, store.page_table.shape[1])
        pages.take([0] * len(chosen), history, None)
        store.page_table = torch.tensor(pages.tables, dtype=torch.int32)
        counts = {"page_table": history, "window_table": [layer.config.window_slots] * len(chosen)}
        for b, source in enumerate(chosen):
            for table, names in (("page_table", fmt.INT2_ARRAYS), ("window_table", fmt.WINDOW_ARRAYS)):
                for target, page in zip(
                    getattr(store, table)[b, : counts[table][b]].tolist(),
                    getattr(old.store, table)[source].tolist(),
                ):
                    for name in names:
                        getattr(store, name)[target] = getattr(old.store, name)[page]
        store.lengths = old.store.lengths[chosen].clone()
        store.history_pages = old.store.history_pages[chosen].clone()
        layer.store, layer.pages = store, pages
        layer.lengths = [old.lengths[b] for b in chosen]
        layer.reached = [old.reached[b] for b in chosen]

    monkeypatch.setattr(hf_layer.OscarLayer, "select", copying)
    expected = run()
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=1e-5)


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
