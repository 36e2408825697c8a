"""The static mode (max_length given): the tokens and bytes of the growing mode, compiled and not.

Two modes attend to the same rows with tables of another width, which BLAS may sum in another order; so logits
agree to 1e-4, tokens and bytes exactly. Compiled steps run on a CPU with backends that need no compiler of
machine code; CUDA graphs are for the GPU tests.
"""

import copy
import dataclasses
import itertools
import pathlib
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tf = pytest.importorskip("transformers")

from oscar_torch import attention  # noqa: E402
from oscar_torch.core.errors import CacheFullError, ShapeError  # noqa: E402
from oscar_torch.core.page_pool import QuantizedTokensError  # noqa: E402
from oscar_torch.hf import OscarCache, static_state  # noqa: E402
from oscar_torch.hf.static_layer import Ledger, StaticLayer  # noqa: E402
from oscar_torch.quantize import Feedback  # noqa: E402
from parity_tests.hf.tiny import (  # noqa: E402
    GEOMETRY,
    assert_same,
    feed,
    generate,
    hadamard_layer,
    left_padded,
    make_cache,
    make_model,
    make_rotations,
    prompts,
    random_rows,
    stored,
    with_cache,
)

pytestmark = pytest.mark.hf

FAMILIES = ("llama", "qwen3", "gemma3", "gpt_oss")


def compiled(backend: Any = "eager", fullgraph: bool = True) -> Any:
    """A compile_config that `generate` obeys on a CPU too."""
    config = tf.CompileConfig(backend=backend, mode=None, fullgraph=fullgraph)
    config._compile_all_devices = True
    return config


def assert_equal_caches(first, second):
    for one, other in zip(first.layers, second.layers, strict=True):
        assert one.lengths == other.lengths
        for b in range(len(one.lengths)):
            assert_same(stored(one, b), stored(other, b))


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_static_equals_growing(family, how):
    """Ragged prompts, left padding, rings, attention sinks, a flush while decoding: same result."""
    torch._dynamo.reset()
    model = make_model(family)
    ids, mask = left_padded(prompts(1, 70, 378, 450))
    growing, static = make_cache(model), make_cache(model, max_length=470)
    assert static.is_compileable and not growing.is_compileable
    expected = generate(model, ids, growing, 12, attention_mask=mask)
    options = {} if how == "eager" else {"compile_config": compiled()}
    found = generate(model, ids, static, 12, attention_mask=mask, **options)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)
    assert_equal_caches(growing, static)
    assert int(static.get_seq_length()) == growing.get_seq_length() == 461


def fed_rotations(config, steps):
    """Hadamard per head with feedback of full size for keys and values, so that rounding is sequential."""
    rotation_set = make_rotations(config, rounding="sequential", rounding_steps=steps)
    generator = np.random.default_rng(0)
    for layer, plain in rotation_set.layers.items():
        heads, head_dim = plain.key_transform.shape[:2]
        block = np.arange(head_dim) // (head_dim // steps)
        entries = generator.integers(-127, 128, (2, heads, head_dim, head_dim))
        entries = torch.from_numpy((entries * (block[:, None] < block[None])).astype(np.int8))
        shift = torch.full((heads,), 7, dtype=torch.int32)
        key, value = (Feedback(matrix, shift, steps) for matrix in entries)
        rotation_set.layers[layer] = dataclasses.replace(plain, key_feedback=key, value_feedback=value)
    return rotation_set


def test_static_rounds_sequentially():
    """A set with feedback: the bytes of the growing mode, and others than without."""
    model = make_model("llama", head_dim=32)
    (ids,) = prompts(450)
    rotation_set = fed_rotations(model.config, 2)
    growing = OscarCache(rotation_set, model.config)
    static = OscarCache(rotation_set, model.config, max_length=464)
    expected = generate(model, ids, growing, 12)
    found = generate(model, ids, static, 12)
    assert torch.equal(found.sequences, expected.sequences)
    assert_equal_caches(growing, static)
    plain = OscarCache(make_rotations(model.config), model.config)
    generate(model, ids, plain, 12)
    assert not torch.equal(plain.layers[0].store.key_codes, growing.layers[0].store.key_codes)
    assert_equal_caches(static, copy.deepcopy(static))


def test_sampling_equals_growing():
    (ids,) = prompts(40)
    model = make_model("qwen3")
    tokens = []
    for options in ({}, {"max_length": 60}):
        torch.manual_seed(3)
        cache = make_cache(model, **options)
        tokens.append(generate(model, ids, cache, 10, do_sample=True, temperature=2.0).sequences)
    assert torch.equal(*tokens)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_several_turns_equal_growing(how):
    """Padding between the turns, and a second turn after steps that only the device has counted."""
    torch._dynamo.reset()
    model = make_model("gemma3")
    results, caches = [], [make_cache(model), make_cache(model, max_length=520)]
    for cache in caches:
        ids, mask = left_padded(prompts(350, 31))
        options = {"compile_config": compiled()} if how == "compiled" and cache is caches[1] else {}
        for turn in range(3):
            ids = generate(model, ids, cache, 5, attention_mask=mask, **options).sequences
            more, more_mask = left_padded(prompts(9, 40 - turn, seed=turn))
            mask = torch.cat([mask, torch.ones(2, 5, dtype=torch.long), more_mask], 1)
            ids = torch.cat([ids, more], 1)
        results.append(ids)
    assert torch.equal(*results)
    assert_equal_caches(*caches)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_full_is_an_error_before_the_step(how):
    """[26] A step that would not fit is refused on the host: nothing is stored, in no layer."""
    torch._dynamo.reset()
    model = make_model("llama")
    ids, mask = left_padded(prompts(60, 40))
    options = {"compile_config": compiled()} if how == "compiled" else {}
    cache, expected = (make_cache(model, max_length=n) for n in (64, 70))
    generate(model, ids, expected, 5, attention_mask=mask)  # stores four of them
    with pytest.raises(CacheFullError, match="65 tokens, max_length = 64"):
        generate(model, ids, cache, 6, attention_mask=mask, **options)
    assert [layer.lengths for layer in cache.layers] == [[64, 44]] * 2
    assert_equal_caches(expected, cache)
    mask = torch.cat([mask, torch.ones(2, 10, dtype=torch.long)], 1)
    with pytest.raises(CacheFullError, match="70 tokens, max_length = 64"), torch.no_grad():
        model(ids[:, :6], attention_mask=mask, use_cache=True, **with_cache(model, cache))
    assert_equal_caches(expected, cache)


def test_one_graph_serves_other_caches_and_breaks_nowhere():
    """The whole step is one graph; another cache of the same layout runs in it, its own bytes changing."""
    torch._dynamo.reset()
    model = make_model("gemma3")
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    rows = prompts(400, 390)
    step = torch.compile(model, backend=counting, fullgraph=True)
    for ids in rows:
        static, growing = make_cache(model, max_length=450), make_cache(model)
        with torch.no_grad():
            for run, cache in ((step, static), (model, growing)):
                model(ids, use_cache=True, **with_cache(model, cache))
                for token in ids[0, :3]:
                    out = run(token.reshape(1, 1).clone(), use_cache=True, **with_cache(model, cache))
        assert_equal_caches(growing, static)
    assert len(graphs) == 1
    calls = [node for node in graphs[0].graph.nodes if "decode_step" in str(node.target)]
    assert len(calls) == 2, "one call per layer"
    assert out.logits.shape == (1, 1, 97)


@pytest.mark.parametrize("batch", [1, 2])
def test_generate_compiles_one_step_once(batch):
    """No input of a step changes its size or strides from step to step, whatever the batch."""
    torch._dynamo.reset()
    model = make_model("gemma3")
    ids, mask = left_padded(prompts(70, 60)[:batch])
    graphs = []

    def counting(graph, inputs):
        graphs.append([x.stride() for x in inputs if isinstance(x, torch.Tensor)])
        return graph.forward

    cache = make_cache(model, max_length=90)
    generate(model, ids, cache, 8, attention_mask=mask, compile_config=compiled(counting))
    assert len(graphs) == 1


def test_declared_mutations_are_the_real_ones():
    """Functionalized by AOTAutograd, which believes the declaration, the step still stores its rows."""
    torch._dynamo.reset()
    model = make_model("qwen3")
    (ids,) = prompts(383)
    growing, static = make_cache(model), make_cache(model, max_length=400)
    expected = generate(model, ids, growing, 6)
    found = generate(model, ids, static, 6, compile_config=compiled("aot_eager"))
    assert torch.equal(found.sequences, expected.sequences)
    assert_equal_caches(growing, static)


def test_a_step_asks_the_device_nothing(monkeypatch):
    """Neither our part nor transformers' turns a tensor into a number between two steps."""
    model = make_model("gemma3")
    ids, mask = left_padded(prompts(400, 380))
    cache = make_cache(model, max_length=450)
    buffers = []
    with torch.no_grad():
        model(ids, attention_mask=mask, use_cache=True, **with_cache(model, cache))
        buffers.append([layer.buffer.data_ptr() for layer in cache.layers])

        def refuse(self, *arguments):
            raise AssertionError("a wait for the device")

        # Kernels count their pages on the device; the reference, beside them, asks how many blocks there are.
        monkeypatch.setattr(attention, "_number", lambda count, otherwise: otherwise)
        for name in ("item", "tolist", "__bool__", "__int__", "__index__", "__float__", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, refuse)
        for step in range(3):
            mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
            inputs = model.prepare_inputs_for_generation(
                ids[:, step : step + 1], attention_mask=mask, **with_cache(model, cache)
            )
            model(**inputs)
        monkeypatch.undo()
        buffers.append([layer.buffer.data_ptr() for layer in cache.layers])
    assert buffers[0] == buffers[1] and cache.layers[0].lengths == [403, 383]


def test_crop_select_and_copy():
    """Host-side truths: what is taken back, reordered or copied continues as in the growing mode."""
    model = make_model("gemma3")
    ids, mask = left_padded(prompts(450, 100, 33))
    caches = [make_cache(model), make_cache(model, max_length=520)]
    results = []
    for cache in caches:
        first = generate(model, ids, cache, 6, attention_mask=mask).sequences
        cache.crop(-3)
        branch = copy.deepcopy(cache)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        columns = torch.ones(3, 6, dtype=torch.long)
        again = [
            generate(
                model, first[rows], which, 4, attention_mask=torch.cat([mask, columns], 1)[rows]
            ).sequences
            for which, rows in ((cache, [0, 0, 2, 2]), (branch, [0, 1, 2]))
        ]
        results.append([first, *again])
        cache.reset()
        results[-1].append(generate(model, ids, cache, 4, attention_mask=mask).sequences)
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)
    assert_equal_caches(*caches)


def test_a_crop_that_cannot_be_exact_is_refused():
    model = make_model("llama", num_hidden_layers=1)
    (ids,) = prompts(383)
    cache = make_cache(model, max_length=500)
    generate(model, ids, cache, 4)
    with pytest.raises(QuantizedTokensError, match=r"from 386 to 383 tokens: tokens 64\.\.127 are quantized"):
        cache.crop(-3)
    cache.crop(-2)
    assert cache.layers[0].lengths == [384] and int(cache.get_seq_length()) == 384
    with torch.no_grad(), pytest.raises(ShapeError, match="a batch of 2 for a cache of 1"):
        model(ids[:, :1].expand(2, -1), use_cache=True, **with_cache(model, cache))
    with torch.no_grad(), pytest.raises(ShapeError, match="mask of 4 columns, expected 385"):
        model(ids[:, :1], attention_mask=torch.ones(1, 4), use_cache=True, **with_cache(model, cache))
    # A step in which one sequence rests: the columns' tokens are known to the device alone.
    two = make_cache(model, max_length=500)
    rows, mask = torch.cat(prompts(20, 20)), torch.ones(2, 20, dtype=torch.long)
    with torch.no_grad():
        model(rows, use_cache=True, **with_cache(model, two))
        for _ in range(2):
            mask = torch.cat([mask, torch.tensor([[1], [0]])], 1)
            model(rows[:, :1], attention_mask=mask, use_cache=True, **with_cache(model, two))
    assert two.layers[0].lengths == [22, 20]
    with torch.no_grad():
        mask = torch.cat([mask, torch.tensor([[1], [1]])], 1)
        model(rows[:, :1], attention_mask=mask, use_cache=True, **with_cache(model, two))
    with pytest.raises(ShapeError, match="3 decoding steps with padding"):
        two.crop(-1)
    two.crop(-3)
    assert two.layers[0].lengths == [20, 20]


def test_the_buffer_holds_every_array_once():
    """Views neither overlap nor leave the buffer, and every one begins where kernels can read vectors."""
    for layout in (
        static_state.Layout(3, 5, 8, 2, 64, 64, 256, 2),
        static_state.Layout(2, 128, 8, 2, 64, 64, 256, 0),
        static_state.Layout(3, 5, 8, 2, 64, 64, 256, 2, 4, 4),
    ):
        places, size = static_state._places(layout)
        buffer = torch.zeros(size, dtype=torch.uint8)
        state = static_state.open_state(buffer, layout, None)
        fields = [*vars(state.store).values(), *(vars(state.rotation).values() if state.rotation else ())]
        fields += [part for field in fields if isinstance(field, Feedback) for part in vars(field).values()]
        arrays: list[Any] = [a for a in (*fields, state.reached) if isinstance(a, torch.Tensor)]
        assert len(arrays) == len(places)
        spans = sorted((a.data_ptr() - buffer.data_ptr(), a.nbytes) for a in arrays)
        assert all(start % 256 == 0 for start, _ in spans)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
        assert spans[-1][0] + spans[-1][1] <= size


def test_a_buffer_is_opened_once_and_let_go():
    """A compiled step finds the layer's own arrays by their address; who holds them no longer frees them."""
    layer = static_layer(None)
    feed(layer, random_rows(1, 3))
    assert layer.buffer is not None
    address, opened = layer.buffer.data_ptr(), static_state._opened
    assert opened[address] is layer.state
    twin = layer.copy()
    assert twin.buffer is not None
    assert opened[twin.buffer.data_ptr()] is twin.state and opened[address] is layer.state
    layer.reset()
    assert address not in opened and twin.state is not None


def test_the_documented_lines_run():
    """The second Python block of docs/transformers.md, as it stands there: three lines, the compiled path."""
    model = make_model("llama")
    page = pathlib.Path(__file__).parents[2] / "docs" / "transformers.md"
    example = page.read_text().split("```python\n")[2].split("```")[0]
    assert len(example.strip().splitlines()) == 3
    (ids,) = prompts(150)
    variables = {
        "OscarCache": OscarCache,
        "model": model,
        "rotations": make_rotations(model.config),
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
    }
    exec(example, variables)
    assert variables["output"].shape == (1, 150 + 256)
    assert variables["cache"].layers[0].store.history_pages.tolist() == [1]
    assert variables["cache"].is_compileable


def test_prompt_lookup_rolls_back():
    """[10] Drafts are taken back across a page flush; while rows are recorded nothing is compiled."""
    model = make_model("gemma3")
    (short,) = prompts(12)
    long = short.repeat(1, 31)  # 372 tokens: the first flush comes while drafting
    caches = [make_cache(model), make_cache(model, max_length=500)]
    options = {"prompt_lookup_num_tokens": 3, "output_logits": False}
    found = [generate(model, long, cache, 30, **options).sequences for cache in caches]
    assert torch.equal(*found)
    assert_equal_caches(*caches)
    assert int(caches[1].get_seq_length()) == caches[0].get_seq_length() == found[0].shape[1] - 1
    assert not caches[1].is_compileable


def static_layer(window):
    rotation = None if window else hadamard_layer(16, 2)
    return StaticLayer(
        0, GEOMETRY, rotation, sliding_window=window, max_length=600, ledger=Ledger(600), leading=True
    )


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kept", [0, 1, 5, 9])
def test_recorded_rows_are_taken_back_across_a_page(window, kept):
    """Steps and short prompts after `activate_past_recording`, with padding among them."""
    layer, expected = static_layer(window), static_layer(window)
    rows, draft = random_rows(2, 380), random_rows(2, 9, seed=1)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :3] = False
    feed(layer, rows)
    feed(expected, rows)
    layer.activate_past_recording()
    for step in (slice(0, 6), slice(6, 7), slice(7, 9)):
        feed(layer, draft[:, step], real[:, step])
    layer.crop(-(9 - kept))
    if kept:
        feed(expected, draft[:, :kept], real[:, :kept])
    assert layer.lengths == expected.lengths == [380 + kept, 380 + max(0, kept - 3)]
    for b in range(2):
        assert_same(stored(layer, b), stored(expected, b))
    layer.deactivate_past_recording()
    more = random_rows(2, 70, seed=2)
    assert torch.equal(feed(layer, more), feed(expected, more))
    assert int(layer.get_seq_length()) == 380 + kept + 70


def test_beams_equal_growing():
    """Beams copy whole sequences here and share pages there; past a flush, with padding."""
    model = make_model("llama")
    ids, mask = left_padded(prompts(380, 60))
    results = []
    for options in ({}, {"max_length": 420}):
        cache = make_cache(model, **options)
        results.append(generate(model, ids, cache, 8, num_beams=3, attention_mask=mask).sequences)
    assert torch.equal(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_cuda_graphs_give_the_logits_of_eager_steps(family):
    """Compiled by `generate` itself, replayed as CUDA graphs, past a flush; one layer, as compilers fuse."""
    changes: dict[str, Any] = {"num_hidden_layers": 1, "head_dim": 64}
    if family == "gpt_oss":  # attention sinks
        changes["layer_types"] = ["full_attention"]
    model = make_model(family, **changes).to("cuda")
    ids, mask = (x.to("cuda") for x in left_padded(prompts(70, 450)))
    tokens = prompts(70, 70, seed=1)  # the same for both: greedy choices would part at the first near tie
    forced = {"prefix_allowed_tokens_fn": lambda b, row: [int(tokens[b][0, len(row) - ids.shape[1]])]}
    logits, caches = [], []
    for disable in (True, False):
        caches.append(make_cache(model, max_length=600))
        run = generate(model, ids, caches[-1], 70, attention_mask=mask, disable_compile=disable, **forced)
        logits.append(torch.stack(run.logits))
    torch.testing.assert_close(logits[1], logits[0], atol=0.05, rtol=0.01)
    assert [cache.layers[0].lengths for cache in caches] == [[139, 519]] * 2
    assert caches[1].layers[0].store.history_pages.tolist() == [0, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_an_eager_step_does_not_synchronize(family):
    """Torch refuses every wait for the GPU while a step of the whole model runs, rings included."""
    model = make_model(family, head_dim=64).to("cuda")
    ids, mask = (x.to("cuda") for x in left_padded(prompts(400, 450)))
    cache = make_cache(model, max_length=600)
    step = {"position_ids": torch.tensor([[400], [450]], device="cuda"), "use_cache": True}
    masks = [torch.cat([mask, mask.new_ones(2, n)], 1) for n in (1, 2)]
    token = torch.ones((2, 1), dtype=torch.long, device="cuda")
    with torch.no_grad():
        model(ids, attention_mask=mask, use_cache=True, **with_cache(model, cache))
        model(token, attention_mask=masks[0], **step, **with_cache(model, cache))  # compiles the kernels
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(token, attention_mask=masks[1], **step, **with_cache(model, cache))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert cache.layers[-1].lengths == [402, 452]
