"""Sequences over shared pages, in both packages: what is stored, what a model computes, what is refused.

Numbers in docstrings are those of the list of field failures in `parity_tests/README.md`. `ToyModel` is a
two-layer decoder whose NumPy part treats every row alike, so that a difference can only come from the cache.
"""

import ast
import copy
import dataclasses
import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from safetensors.numpy import load_file, save_file

from parity_tests.conformance import oracle, stress
from parity_tests.conformance.frameworks import FRAMEWORKS, Framework
from parity_tests.conformance.rows import make_rotation, mixed_rows
from parity_tests.models.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
HEADS, DIM = 2, 16
LAYERS = 2


@pytest.fixture(params=sorted(FRAMEWORKS))
def framework(request) -> Framework:
    return FRAMEWORKS[request.param]


def new_pool(framework: Framework, recent: int = 64, seed: int = 0, **options: Any) -> Any:
    """A pool of two equal layers on the CPU."""
    rng = np.random.default_rng(seed)
    config = framework.module("core.config").CacheConfig(HEADS, HEADS * 2, DIM, 64, recent)
    rotations = [framework.layer_rotation(make_rotation(rng, HEADS, DIM), "cpu") for _ in range(LAYERS)]
    options = {"model_id": "toy", "max_length": 1300, "max_sequences": 6, **options}
    return framework.module("serving.sequence_pool").SequencePool([config] * LAYERS, rotations, **options)


def errors(framework: Framework) -> Any:
    return framework.module("core.errors")


def page_errors(framework: Framework) -> Any:
    return framework.module("core.page_pool")


@functools.cache
def bank(layer: int, role: str) -> np.ndarray:
    """2048 hostile rows, bits [2048, K, D]."""
    return mixed_rows(np.random.default_rng([layer, role == "key"]), (2048, HEADS, DIM))


def append(pool: Any, framework: Framework, sequences: list, rows: list[list[int]], width: int = 0) -> None:
    """Appends the rows with these numbers of the bank; padding is NaN."""
    width = max([width, 1, *map(len, rows)])
    stacked: dict[str, list] = {"key": [], "value": []}
    for layer in range(LAYERS):
        for role, layers in stacked.items():
            batch = np.full((len(rows), width, HEADS, DIM), 0x7FC1, np.uint16)
            for i, numbers in enumerate(rows):
                batch[i, : len(numbers)] = bank(layer, role)[numbers]
            layers.append(framework.bfloat16(batch, "cpu"))
    pool.append(sequences, stacked["key"], stacked["value"], tokens=rows)


def write(pool: Any, framework: Framework, sequence: int, rows: list[int], width: int = 128) -> None:
    """Appends to one sequence in chunks of one compiled shape."""
    for start in range(0, len(rows), width):
        append(pool, framework, [sequence, None], [rows[start : start + width], []], width)


def stored(pool: Any, framework: Framework, sequence: int) -> list[dict[str, np.ndarray]]:
    """Everything a sequence holds, layer by layer; bf16 as bits."""
    return [
        {n: framework.numpy(a) if framework.name == "torch" else as_bits(a) for n, a in arrays.items()}
        for arrays in (pool.sequence_arrays(sequence, layer) for layer in range(LAYERS))
    ]


def as_bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16) if array.dtype.name == "bfloat16" else array


def assert_equal(left: list[dict[str, np.ndarray]], right: list[dict[str, np.ndarray]]) -> None:
    for a, b in zip(left, right):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def assert_oracle(pool: Any, framework: Framework, sequence: int, rows: list[int], recent: int = 64) -> None:
    """The sequence holds exactly the bytes of the oracle."""
    for layer, arrays in enumerate(stored(pool, framework, sequence)):
        rotation = {n: framework.numpy(getattr(pool.rotations[layer], n)) for n in ROTATION_FIELDS}
        key, value = bank(layer, "key")[rows], bank(layer, "value")[rows]
        wanted = oracle.store_sequence(key, value, rotation, 64, recent)
        for name in ("key_codes", "value_codes", "key_scale", "value_scale", "key_page_mean"):
            np.testing.assert_array_equal(arrays[name], getattr(wanted, name), err_msg=name)
        for role in ("key", "value"):
            window = arrays[f"window_{role}"].transpose(0, 2, 1, 3).reshape(-1, HEADS, DIM)
            raw = np.concatenate([getattr(wanted, f"sink_{role}"), getattr(wanted, f"recent_{role}")])
            np.testing.assert_array_equal(window[: len(raw)], raw)


ROTATION_FIELDS = ("key_transform", "key_multiplier", "value_transform", "value_multiplier", "value_mean")


# ------------------------------------------------------------ a model


class ToyModel:
    """Two attention layers over a SequencePool, greedy; its own arithmetic does not depend on the batch."""

    VOCABULARY, WIDTH = 61, 32

    def __init__(self, framework: Framework, pool: Any) -> None:
        rng = np.random.default_rng(11)
        self.framework, self.pool = framework, pool
        width = self.WIDTH
        self.embedding = rng.normal(0, 1, (self.VOCABULARY, width)).astype(np.float32)
        self.position = rng.normal(0, 0.5, (2048, width)).astype(np.float32)
        sizes = {"q": 2 * HEADS * DIM, "k": HEADS * DIM, "v": HEADS * DIM}
        self.weights = [
            {
                name: rng.normal(0, width**-0.5, (width, size)).astype(np.float32)
                for name, size in sizes.items()
            }
            | {"o": rng.normal(0, 0.3, (2 * HEADS * DIM, width)).astype(np.float32)}
            for _ in range(LAYERS)
        ]
        attend = framework.module("cache").attend
        self.attend = framework.compiled(attend, "softmax_scale", "implementation")

    @staticmethod
    def times(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        """A product whose every row is summed in the same order, whatever the number of rows."""
        return (rows[..., None] * matrix).sum(axis=-2)

    def run(self, sequences: list, tokens: list[list[int]], width: int) -> np.ndarray:
        """Appends tokens to a batch of `width` columns; logits of each row's last token."""
        step = self.pool.begin(sequences, tokens=tokens)
        batch = np.zeros((len(sequences), width), np.int64)
        starts = [0 if s is None else self.pool.length(s) for s in sequences]
        for row, new in zip(batch, tokens):
            row[: len(new)] = new
        positions = np.array(starts)[:, None] + np.arange(width)
        x = self.embedding[batch] + self.position[positions]
        caches = []
        for layer, (weights, cache) in enumerate(zip(self.weights, step.caches)):
            q, k, v = (self.times(x, weights[name]) for name in ("q", "k", "v"))
            shape = (*batch.shape, -1, DIM)
            query = self.framework.array(q.reshape(shape), "cpu")
            key, value = (
                self.framework.bfloat16(oracle.to_bfloat16(rows.reshape(shape)), "cpu") for rows in (k, v)
            )
            out, cache = self.attend(
                query,
                key,
                value,
                cache,
                self.pool.rotations[layer],
                new_lengths=step.new_lengths,
                softmax_scale=0.25,
            )
            out = np.array(self.framework.numpy(out)).reshape(*batch.shape, -1)
            x = np.tanh(x + self.times(out, weights["o"]))
            caches.append(cache)
        self.pool.finish(step, caches)
        last = x[np.arange(len(sequences)), [max(0, len(new) - 1) for new in tokens]]
        return self.times(last, self.embedding.T)

    def prefill(self, sequence: int, prompt: list[int]) -> np.ndarray:
        """The rest of a prompt in chunks on the grid, beside a padding row; logits after it."""
        grid, logits = self.pool.pages.grid_tokens, None
        while (start := self.pool.length(sequence)) < len(prompt):
            stop = min(len(prompt), (start // grid + 1) * grid)
            logits = self.run([sequence, None], [prompt[start:stop], []], grid)[0]
        assert logits is not None, "at least one token is left to compute"
        return logits

    def generate(self, sequence: int, logits: np.ndarray, count: int) -> list[int]:
        """Greedy tokens."""
        result = []
        for _ in range(count):
            result.append(int(logits.argmax()))
            logits = self.run([sequence, None], [[result[-1]], []], 1)[0]
        return result


def prompt_tokens(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, ToyModel.VOCABULARY, length).tolist()


class TestModel:
    def test_interleaved_requests_with_and_without_sharing_are_equal(self, framework):
        """Sharing on or off: equal tokens, equal bytes of every page (1, 2)."""
        system = prompt_tokens(270, 1)
        requests = [system + prompt_tokens(n, 2 + n) for n in (5, 70, 150)] + [system[:200]]
        results = {}
        for reuse in ("exact", None):
            model = ToyModel(framework, new_pool(framework))
            result, living = [], []
            for i, prompt in enumerate(requests):
                sequence = model.pool.create(prompt, reuse=reuse)
                assert (model.pool.length(sequence) > 0) == (reuse == "exact" and i > 0)
                tokens = model.generate(sequence, model.prefill(sequence, prompt), 6)
                result.append((tokens, stored(model.pool, framework, sequence)))
                living.append(sequence)
                if i % 2:
                    model.pool.free(living.pop(0))
                model.pool.pages.check()
            results[reuse] = result
            if reuse == "exact":
                assert model.pool.statistics().reused_tokens >= 2 * 256 + 192
        for (tokens, pages), (tokens_alone, pages_alone) in zip(results["exact"], results[None]):
            assert tokens == tokens_alone
            assert_equal(pages, pages_alone)

    def test_generated_tokens_continue_the_conversation(self, framework):
        """A second turn on generated pages equals continuing the sequence that wrote them."""
        model = ToyModel(framework, new_pool(framework))
        pool, first = model.pool, prompt_tokens(100)
        writer = pool.create(first)
        answer = model.generate(writer, model.prefill(writer, first), 160)
        turn = first + answer + prompt_tokens(40, 5)
        assert pool.pages.find_prefix(turn).length == 64, "only the prompt's own page is on the grid"
        borrower = pool.create(turn, generated=True)
        resumed = pool.length(borrower)
        assert resumed == 256
        same = pool.fork(writer)
        pool.truncate(same, resumed)
        logits = [model.prefill(sequence, turn) for sequence in (borrower, same)]
        np.testing.assert_array_equal(logits[0], logits[1])
        assert_equal(stored(pool, framework, borrower), stored(pool, framework, same))
        pool.pages.check()

    def test_quantized_reuse_borrows_pages_and_keeps_recent_rows(self, framework):
        """The donor's pages are shared by reference, and never change; the borrower's last rows are BF16."""
        pool = new_pool(framework)
        model, prompt = ToyModel(framework, pool), prompt_tokens(500)
        donor = pool.create(prompt)
        model.prefill(donor, prompt)
        before = stored(pool, framework, donor)
        while pool.pages.window.kept:  # no BF16 page is left of what the donor has quantized
            pool.pages.window.evict()
        longer = prompt[:400] + prompt_tokens(100, 9)
        borrower = pool.create(longer, reuse="quantized")
        history = pool.pages.config.history_pages(500)
        assert pool.length(borrower) == 64 + 64 * history == 384
        assert pool.pages.state(borrower).int2_pages == pool.pages.state(donor).int2_pages[:history]
        model.prefill(borrower, longer)
        assert_equal(before, stored(pool, framework, donor))
        assert len(pool.pages.state(borrower).int2_pages) == history
        assert pool.pages.state(borrower).grid_length == 384, "what follows is not on the grid"
        alone = pool.create()
        model.prefill(alone, longer)
        first, second = zip(stored(pool, framework, borrower), stored(pool, framework, alone))
        assert_equal([first[0]], [first[1]])
        # The documented price: behind a quantized prefix the second layer computes other rows.
        assert not np.array_equal(second[0]["window_key"], second[1]["window_key"])
        pool.pages.check()

    def test_fresh_and_continued_requests_in_one_batch(self, framework):
        """The continued request keeps its prefix (29), and neighbours in a batch do not matter (21)."""
        model = ToyModel(framework, new_pool(framework))
        pool, prompt = model.pool, prompt_tokens(256)
        continued = pool.create(prompt)
        model.prefill(continued, prompt)
        alone = pool.fork(continued)
        chunk, other = prompt_tokens(64, 3), prompt_tokens(64, 4)
        fresh = pool.create()
        together = model.run([fresh, continued], [other, chunk], 64)[1]
        np.testing.assert_array_equal(together, model.run([None, alone], [[], chunk], 64)[1])
        assert_equal(stored(pool, framework, continued), stored(pool, framework, alone))


def test_a_flax_decoder_serves_shared_prefixes(tmp_path):
    """The loop of docs/serving.md with a real decoder: equal logits and bytes, shared or not (1)."""
    import jax.numpy as jnp
    from flax import nnx

    from oscar_jax.models.cached_attention import CachedAttention
    from oscar_jax.models.weights import load_model
    from oscar_jax.rotations.rotation import hadamard_rotation
    from oscar_jax.serving.sequence_pool import SequencePool

    model, config, _ = load_model(write_tiny_model(tmp_path / "model"))
    layers = config.num_layers
    rotation = hadamard_rotation(config.num_key_value_heads, config.head_dim)

    @nnx.jit
    def forward(model, rotations, tokens, caches, new_lengths):
        positions = caches[0].lengths[:, None] + jnp.arange(tokens.shape[1])
        attention = CachedAttention(model.config, dict(enumerate(rotations)), new_lengths)
        return model(tokens, caches, positions=positions, attention=attention)

    stem = np.random.default_rng(0).integers(0, 250, 256).tolist()
    results = {}
    for reuse in ("exact", None):
        geometry = config.cache_config(recent_tokens=64)
        pool = SequencePool([geometry] * layers, [rotation] * layers, model_id="tiny", max_length=512)
        results[reuse] = []
        for tail in ([1, 2, 3], [4, 5, 6, 7]):
            prompt, logits = stem + tail, np.empty(0)
            sequence = pool.create(prompt, reuse=reuse)
            assert pool.length(sequence) == (256 if reuse and results[reuse] else 0)
            while (start := pool.length(sequence)) < len(prompt) + 4:
                new = prompt[start : start + 64] or [int(jnp.argmax(logits[-1]))]
                step = pool.begin([sequence], tokens=[new])
                width = 64 if start < len(prompt) else 1
                tokens = np.zeros((1, width), np.int32)
                tokens[0, : len(new)] = new
                batch, caches = forward(model, pool.rotations, tokens, step.caches, step.new_lengths)
                pool.finish(step, caches)
                logits = np.asarray(batch[0, : len(new)])
            pages = [pool.sequence_arrays(sequence, layer) for layer in range(layers)]
            results[reuse].append((logits, [{n: as_bits(a) for n, a in arrays.items()} for arrays in pages]))
    for (logits, pages), (logits_alone, pages_alone) in zip(results["exact"], results[None]):
        np.testing.assert_array_equal(logits, logits_alone)
        assert_equal(pages, pages_alone)


# ------------------------------------------------------------ stored bytes


class TestBytes:
    LENGTHS = (1, 7, 64, 65, 320, 321)

    def test_ragged_batch_equals_single_sequences(self, framework):
        """Lengths 1 ... 321 in one batch, in any order, rows leaving and joining (19, 25)."""
        pool = new_pool(framework, recent=256)
        rng = np.random.default_rng(5)
        rows = {pool.create(): rng.integers(0, 2048, length + 90).tolist() for length in self.LENGTHS}
        done = dict.fromkeys(rows, 0)
        for target in (0, 90):  # prompts, then more of everything without the longest row
            goal = {s: n + target for s, n in zip(rows, self.LENGTHS)}
            while pending := [s for s in rows if s in goal and done[s] < goal[s]]:
                batch: list = [pending[i] if i < len(pending) else None for i in rng.permutation(6)]
                new = [[] if s is None else rows[s][done[s] : min(goal[s], done[s] + 64)] for s in batch]
                append(pool, framework, batch, new, 64)
                for sequence, part in zip(batch, new):
                    if sequence is not None:
                        done[sequence] += len(part)
            for sequence, length in done.items():
                assert_oracle(pool, framework, sequence, rows[sequence][:length], 256)
            longest = max(rows)
            if target == 0:
                pool.free(longest)
                del rows[longest], done[longest]

    def test_padding_rows_touch_nothing(self, framework):
        """Rows of NaN beside and after the real ones: no live page changes, page 0 stays empty (3, 28)."""
        pool = new_pool(framework)
        first, second = pool.create(), pool.create()
        numbers = list(range(400))
        write(pool, framework, first, numbers)
        before = stored(pool, framework, first)
        for _ in range(3):
            append(pool, framework, [None, second, first, None], [[], [5] * 50, [], []], 64)
        assert_equal(before, stored(pool, framework, first))
        assert_oracle(pool, framework, second, [5] * 150)
        for cache in pool.view([None]):
            for name in ("key_codes", "value_codes", "key_scale", "window_key", "window_value"):
                assert not framework.numpy(getattr(cache, name))[0].any()

    @pytest.mark.parametrize("kept", [0, 1, 5])
    def test_rejected_draft_never_was(self, framework, kept):
        """Append 6 draft tokens, keep some: the bytes of a sequence that never saw the others (10)."""
        pool = new_pool(framework)
        draft, plain = pool.create(), pool.create()
        numbers = list(range(700, 1100))
        write(pool, framework, draft, numbers[:200])
        write(pool, framework, plain, numbers[:200])
        for start in range(200, 250, 10):
            length = pool.length(draft)
            append(
                pool,
                framework,
                [draft, None],
                [[*numbers[length : length + kept], *[9] * (6 - kept)], []],
                128,
            )
            pool.truncate(draft, length + kept)
            append(
                pool,
                framework,
                [draft, plain],
                [numbers[length + kept : start + 10], numbers[start : start + 10]],
                128,
            )
        assert_equal(stored(pool, framework, draft), stored(pool, framework, plain))
        assert_oracle(pool, framework, draft, numbers[:250])

    def test_rollback_over_the_flush_boundary_is_refused_or_kept(self, framework):
        """Cutting to where a quantized token would have to be BF16 is refused by name (10, 23)."""
        pool = new_pool(framework)
        sequence = pool.create()
        numbers = list(range(260))
        write(pool, framework, sequence, numbers)
        with pytest.raises(page_errors(framework).QuantizedTokensError, match="keep_quantized"):
            pool.truncate(sequence, 250)
        assert_oracle(pool, framework, sequence, numbers)
        assert pool.truncate(sequence, 250, keep_quantized=True) == 250
        write(pool, framework, sequence, numbers[250:])
        assert_oracle(pool, framework, sequence, numbers)
        assert pool.truncate(sequence, 150, keep_quantized=True) == 128
        write(pool, framework, sequence, numbers[128:])
        assert_oracle(pool, framework, sequence, numbers)

    def test_one_prefilled_cache_serves_several_continuations(self, framework):
        """Branch twice, also from a snapshot: equal to writing each from the start (24)."""
        pool = new_pool(framework)
        stem, left, right = list(range(300)), list(range(300, 420)), list(range(900, 1020))
        root = pool.create()
        write(pool, framework, root, stem)
        branches = [pool.fork(root), pool.fork(root)]
        for branch, tail in zip(branches, (left, right)):
            write(pool, framework, branch, tail)
        assert_oracle(pool, framework, branches[0], stem + left)
        assert_oracle(pool, framework, branches[1], stem + right)
        assert_oracle(pool, framework, root, stem)
        shared = [set(pool.pages.state(s).int2_pages) for s in (root, *branches)]
        assert shared[0] <= shared[1] & shared[2]

    def test_beams_reorder_history_and_recent_rows_together(self, framework):
        """Reorder and repeat move whole sequences, and no caller's setting changes (23)."""
        pool = new_pool(framework)
        config = pool.configs[0]
        before = (config, repr(config))
        root = pool.create()
        write(pool, framework, root, list(range(250)))
        beams = pool.repeat(root, 3)
        rows = [list(range(250)) for _ in beams]
        rng = np.random.default_rng(2)
        for _ in range(12):
            new = rng.integers(0, 2048, (3, 7)).tolist()
            append(pool, framework, beams, new, 7)
            order = rng.integers(0, 3, 3).tolist()
            beams = pool.reorder(beams, order)
            rows = [rows[source] + new[source] for source in order]
        for beam, numbers in zip(beams, rows):
            assert_oracle(pool, framework, beam, numbers)
            pool.free(beam)
        assert pool.statistics().live_bytes == 0
        assert (config, repr(config)) == before

    def test_a_thousand_single_tokens_agree_between_eager_and_compiled(self):
        """JAX compiled and Torch eager, one token at a time: equal bytes, and no array grows (15, 26)."""
        numbers = np.random.default_rng(8).integers(0, 2048, 1100).tolist()
        results = []
        for framework in FRAMEWORKS.values():
            pool = new_pool(framework)
            sequence = pool.create()
            shapes = [
                framework.numpy(a).shape for a in vars(pool.view([None])[0]).values() if hasattr(a, "shape")
            ]
            for number in numbers:
                append(pool, framework, [sequence], [[number]])
            assert len(pool.pages.state(sequence).int2_pages) == (1100 - 128) // 64
            assert shapes == [
                framework.numpy(a).shape for a in vars(pool.view([None])[0]).values() if hasattr(a, "shape")
            ]
            results.append(stored(pool, framework, sequence))
        assert_equal(*results)

    def test_layers_of_different_geometry_share_one_table(self):
        """Mixed heads and head_dim in one model (9): the worlds of the stress test have such layers."""
        for world in stress.WORLDS:
            assert len(set(world.layers)) > 1


class TestSnapshots:
    @pytest.mark.parametrize("length", [0, 1, 64, 65, 300])
    def test_round_trip_between_packages(self, tmp_path, length):
        """A file of either package restores in both to equal bytes, and is the same from both."""
        numbers = list(range(1000, 1000 + length))
        files = []
        for name, framework in FRAMEWORKS.items():
            pool = new_pool(framework)
            sequence = pool.create()
            write(pool, framework, sequence, numbers)
            files.append(tmp_path / f"{name}.safetensors")
            pool.snapshot(sequence, files[-1])
        first, second = (load_file(path) for path in files)
        assert first.keys() == second.keys()
        for name in first:
            assert first[name].tobytes() == second[name].tobytes(), name
        for framework in FRAMEWORKS.values():
            pool = new_pool(framework)
            for path in files:
                sequence = pool.restore(path)
                assert_oracle(pool, framework, sequence, numbers)
                write(pool, framework, sequence, list(range(100)))
                assert_oracle(pool, framework, sequence, numbers + list(range(100)))
            pool.pages.check()

    def test_restored_pages_are_found_again(self, framework, tmp_path):
        pool = new_pool(framework)
        sequence = pool.create()
        numbers = list(range(300))
        for start in range(0, 300, 64):
            append(pool, framework, [sequence, None], [numbers[start : start + 64], []], 128)
        pool.snapshot(sequence, tmp_path / "s")
        other = new_pool(framework)
        other.restore(tmp_path / "s")
        prefix = other.pages.find_prefix(numbers)
        assert prefix is not None and prefix.length == 256 and prefix.grid

    def snapshot(self, framework: Framework, folder: Path) -> Path:
        pool = new_pool(framework)
        sequence = pool.create()
        write(pool, framework, sequence, list(range(300)))
        pool.snapshot(sequence, folder / "s.safetensors")
        return folder / "s.safetensors"

    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"model_id": "another"}, "model_id"),
            ({"seed": 1}, "rotation_digest"),
            ({"recent": 128}, "recent_tokens"),
            ({"grid_tokens": 128}, "grid_tokens"),
        ],
    )
    def test_another_model_is_refused(self, framework, tmp_path, options, field):
        """Wrong model, rotation or settings: refused by metadata, not by name (16)."""
        path = self.snapshot(framework, tmp_path)
        pool = new_pool(framework, **options)
        with pytest.raises(errors(framework).CheckpointError, match=field):
            pool.restore(path)
        assert pool.statistics().sequences == 0 and pool.statistics().live_bytes == 0

    def test_damaged_files_are_refused(self, framework, tmp_path):
        path = self.snapshot(framework, tmp_path)
        pool = new_pool(framework)
        refused = errors(framework).CheckpointError
        tensors, metadata = load_file(path), read_metadata(path)

        def rewritten(tensors: dict, metadata: dict) -> Path:
            save_file(tensors, tmp_path / "bad", metadata)
            return tmp_path / "bad"

        (tmp_path / "cut").write_bytes(path.read_bytes()[:-100])
        (tmp_path / "text").write_text("not a snapshot")
        for name in ("cut", "text", "absent"):
            with pytest.raises(refused, match="not a readable"):
                pool.restore(tmp_path / name)
        with pytest.raises(refused, match="format"):
            pool.restore(rewritten(tensors, metadata | {"format": "oscar-int2/2"}))
        with pytest.raises(refused, match="incomplete"):
            pool.restore(rewritten(tensors, {k: v for k, v in metadata.items() if k != "length"}))
        missing = {k: v for k, v in tensors.items() if k != "layers.1.key_scale"}
        with pytest.raises(refused, match=r"layers\.1\.key_scale"):
            pool.restore(rewritten(missing, metadata))
        with pytest.raises(refused, match="expected"):
            pool.restore(rewritten(tensors, metadata | {"length": "400"}))
        with pytest.raises(refused, match="is not a sequence"):
            pool.restore(rewritten(tensors, metadata | {"grid_length": "301"}))
        wrong = tensors | {"layers.0.key_scale": tensors["layers.0.key_scale"].astype(np.float32)}
        with pytest.raises(refused, match="float32"):
            pool.restore(rewritten(wrong, metadata))
        assert pool.statistics().live_bytes == 0
        pool.restore(path)

    def test_no_room_to_restore(self, framework, tmp_path):
        path = self.snapshot(framework, tmp_path)
        pool = new_pool(framework, int2_pages=1)
        with pytest.raises(errors(framework).CacheFullError, match="nothing was changed"):
            pool.restore(path)
        with pytest.raises(errors(framework).CacheFullError, match="max_length"):
            new_pool(framework, max_length=299).restore(path)


def read_metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return file.metadata()


# ------------------------------------------------------------ limits and misuse


class TestLimits:
    def test_arrays_never_exceed_the_byte_budget(self, framework):
        """`max_bytes` bounds the arrays to the byte; one byte less costs one INT2 page."""
        int2 = LAYERS * HEADS * (34 * DIM + 256)
        window = LAYERS * HEADS * 256 * DIM
        budget = 11 * window + 21 * int2
        for less, pages in ((0, 20), (1, 19)):
            pool = new_pool(framework, max_bytes=budget - less, window_pages=10, max_sequences=99)
            assert pool.pages.int2.capacity == pages
            names = (
                "key_codes",
                "value_codes",
                "key_scale",
                "value_scale",
                "key_page_mean",
                "window_key",
                "window_value",
            )
            held = sum(framework.numpy(getattr(c, n)).nbytes for c in pool.view([None]) for n in names)
            assert held == 11 * window + (pages + 1) * int2 <= budget - less
        with pytest.raises(errors(framework).ConfigError, match="max_bytes"):
            new_pool(framework, max_bytes=11 * window, window_pages=10)

    def test_live_bytes_follow_the_formula(self, framework):
        """Bytes of live pages equal the formula, and what the cache itself counts (21)."""
        pool = new_pool(framework)
        for length in (1, 64, 65, 300, 555):
            sequence = pool.create()
            write(pool, framework, sequence, list(range(length)))
            expected = pool.pages.bytes_for(length)
            assert pool.statistics().live_bytes == expected
            live_bytes = framework.module("cache").live_bytes
            assert sum(live_bytes(cache)["total"] for cache in pool.view([sequence])) == expected
            pool.free(sequence)

    def test_a_full_pool_loses_nothing(self, framework):
        pool = new_pool(framework, int2_pages=3, window_pages=8)
        first, second = pool.create(), pool.create()
        write(pool, framework, first, list(range(300)))
        before = stored(pool, framework, first), pool.statistics()
        with pytest.raises(errors(framework).CacheFullError, match="INT2 pages needed"):
            append(pool, framework, [first, second], [list(range(100)), [1]], 128)
        assert_equal(before[0], stored(pool, framework, first))
        assert before[1] == pool.statistics()
        with pytest.raises(errors(framework).CacheFullError, match="max_length = 1300"):
            pool.begin([second], counts=[1301])

    def test_rows_that_do_not_fit_change_nothing(self, framework):
        pool = new_pool(framework)
        sequence = pool.create()
        rows = [framework.bfloat16(np.zeros((1, 4, HEADS, DIM), np.uint16), "cpu")] * LAYERS
        bad = [rows[0], framework.bfloat16(np.zeros((1, 4, HEADS, DIM + 16), np.uint16), "cpu")]
        refused = errors(framework).ShapeError
        with pytest.raises(refused, match="key rows"):
            pool.append([sequence], bad, rows, counts=[4])
        with pytest.raises(refused, match="4 tokens, a sequence appends 5"):
            pool.append([sequence], rows, rows, counts=[5])
        with pytest.raises(refused, match="expected 2"):
            pool.append([sequence], rows[:1], rows, counts=[4])
        with pytest.raises(refused, match="padding row"):
            pool.append([None], rows, rows, counts=[4])
        assert pool.length(sequence) == 0 and pool.statistics().live_bytes == 0
        pool.append([sequence], rows, rows, counts=[4])
        assert pool.length(sequence) == 4

    def test_steps_are_finished_once_and_in_full(self, framework):
        pool = new_pool(framework)
        sequence = pool.create()
        step = pool.begin([sequence, None], counts=[3, 0])
        busy = page_errors(framework).PageStateError
        for call in (
            lambda: pool.begin([sequence], counts=[1]),
            lambda: pool.free(sequence),
            lambda: pool.snapshot(sequence, "never"),
            lambda: pool.restore("never"),
        ):
            with pytest.raises(busy, match="finished"):
                call()
        with pytest.raises(errors(framework).ShapeError, match=r"layer 0 holds \[0, 0\] tokens"):
            pool.finish(step, step.caches)
        with pytest.raises(errors(framework).ShapeError, match="1 layer caches"):
            pool.finish(step, step.caches[:1])
        pool.abort(step)
        with pytest.raises(busy, match="not the one in progress"):
            pool.finish(step, step.caches)
        with pytest.raises(errors(framework).ConfigError, match="either tokens or counts"):
            pool.begin([sequence])

    def test_layers_must_agree_on_windows(self, framework):
        config = framework.module("core.config").CacheConfig
        rotation = framework.layer_rotation(make_rotation(np.random.default_rng(0), 1, 16), "cpu")
        pool = framework.module("serving.sequence_pool").SequencePool
        with pytest.raises(errors(framework).ConfigError, match="must agree"):
            pool([config(1, 1, 16), config(1, 1, 16, 64, 64)], [rotation] * 2, model_id="", max_length=100)
        with pytest.raises(errors(framework).ConfigError, match="one of each per layer"):
            pool([config(1, 1, 16)], [], model_id="", max_length=100)


# ------------------------------------------------------------ wrong arguments

FLOATS = [np.zeros((1, 4, HEADS, DIM), np.float32)] * LAYERS
# What is called with a pool that holds sequence 0 of 300 tokens, and words of the refusal.
WRONG_CALLS = {
    "a count of a fraction": (lambda p: p.append([0], FLOATS, FLOATS, counts=[1.5]), r"counts\[0\] = 1.5"),
    "a count of text": (lambda p: p.begin([0], counts=["4"]), r"counts\[0\] = '4'"),
    "a lone count": (lambda p: p.begin([0], counts=4), "counts = 4"),
    "a negative count": (lambda p: p.begin([0], counts=[-1]), "count = -1"),
    "a lone sequence": (lambda p: p.begin(0, counts=[4]), "sequences = 0"),
    "a lone sequence to read": (lambda p: p.view(0), "sequences = 0"),
    "a sequence that is none": (lambda p: p.begin([[0]], counts=[4]), r"sequence \[0\] does not exist"),
    "flat tokens": (lambda p: p.begin([0], tokens=[5]), "not iterable"),
    "lone tokens": (lambda p: p.begin([0], tokens=5), "tokens = 5"),
    "tokens of fractions": (lambda p: p.begin([0], tokens=[[1.5]]), "whole numbers of 32 bits"),
    "tokens of bytes": (lambda p: p.begin([0], tokens=[b"12345678"]), "tokens: bytes"),
    "a token of 33 bits": (lambda p: p.begin([0], tokens=[np.array([1 << 32])]), "whole numbers of 32 bits"),
    "a prompt of bytes": (lambda p: p.create(b"12345678"), "tokens: bytes"),
    "a lone prompt": (lambda p: p.create(5), "whole numbers of 64 bits"),
    "a prompt of text": (lambda p: p.create("text"), "whole numbers of 64 bits"),
    "unknown reuse": (lambda p: p.create([5], reuse="some"), "reuse = 'some'"),
    "a fork of nothing": (lambda p: p.fork(None), "sequence None does not exist"),
    "an end of nothing": (lambda p: p.free([0]), r"sequence \[0\] does not exist"),
    "a length of a fraction": (lambda p: p.truncate(0, 298.5), "length = 298.5"),
    "copies of a fraction": (lambda p: p.repeat(0, 1.5), "count = 1.5"),
    "beams from a fraction": (lambda p: p.reorder([0], [0, 0.0]), r"sources\[1\] = 0.0"),
    "a layer that is not there": (lambda p: p.read(0, LAYERS), "layer = 2"),
    "a layer from behind": (lambda p: p.sequence_arrays(0, -1), "layer = -1"),
    "rows of no layer": (lambda p: p.append([0], None, FLOATS, counts=[4]), "keys = None"),
}
WRONG_POOLS = {
    "a length of a fraction": ({"max_length": 512.5}, "max_length = 512.5"),
    "a length of text": ({"max_length": "512"}, "max_length = '512'"),
    "bytes of a fraction": ({"max_bytes": 1e9}, "max_bytes = 1000000000.0"),
    "a grid of a fraction": ({"grid_tokens": 64.0}, "grid_tokens = 64.0"),
    "no name": ({"model_id": None}, "model_id = None"),
}


class TestArguments:
    """What cannot be meant is refused in the same words by both packages, and changes nothing (51)."""

    @staticmethod
    def refusal(framework: Framework, call: Any, words: str) -> tuple[str, str]:
        with pytest.raises(errors(framework).OscarError, match=words) as caught:
            call()
        return type(caught.value).__name__, str(caught.value)

    @staticmethod
    def content(pool: Any) -> Any:
        counts = dataclasses.replace(pool.statistics(), peak_live_bytes=0)
        return counts, copy.deepcopy(vars(pool.pages.state(0)))

    @pytest.mark.parametrize("case", WRONG_CALLS)
    def test_calls(self, case):
        call, words = WRONG_CALLS[case]
        refusals = set()
        for framework in FRAMEWORKS.values():
            pool = new_pool(framework)
            pool.pages.import_sequence(300, tokens=list(range(300)))
            kept = self.content(pool)
            refusals.add(self.refusal(framework, functools.partial(call, pool), words))
            assert self.content(pool) == kept
            pool.pages.check()
            pool.abort(pool.begin([0], counts=[1]), untouched=True)
        assert len(refusals) == 1, refusals

    @pytest.mark.parametrize("case", WRONG_POOLS)
    def test_pools(self, case):
        options, words = WRONG_POOLS[case]
        refusals = {
            self.refusal(framework, functools.partial(new_pool, framework, **options), words)
            for framework in FRAMEWORKS.values()
        }
        assert len(refusals) == 1, refusals

    def test_layers(self, framework):
        """Rotations of other heads, and layers with a state instead of keys and values."""
        config = framework.module("core.config").CacheConfig
        one, two = (
            framework.layer_rotation(make_rotation(np.random.default_rng(0), heads, 16), "cpu")
            for heads in (3, 2)
        )
        new = functools.partial(
            framework.module("serving.sequence_pool").SequencePool, model_id="", max_length=100
        )
        for configs, rotations, words in (
            ([config(2, 4, 16)] * 2, [two, None], "layer 1 has CacheConfig and NoneType.*linear attention"),
            ([None, config(2, 4, 16)], [two, two], "layer 0 has NoneType and LayerRotation"),
            ([config(2, 4, 16)], [one], "rotation of 3 heads, expected 1 or 2"),
            ([config(2, 4, 32)], [two], "key_transform"),
            ([config(2, 4, 16, window=128)], [two], "layer 0: window = 128"),
            (config(2, 4, 16), [two], "configs = CacheConfig"),
        ):
            self.refusal(framework, functools.partial(new, configs, rotations), words)


# ------------------------------------------------------------ tenants and adapters


class TestSalts:
    """Pages of equal tokens are shared within a salt and never across salts."""

    NUMBERS = tuple(range(300))

    def filled(self, framework: Framework, salt: bytes) -> tuple[Any, int]:
        """A pool and a sequence in it that stored 300 tokens on the grid."""
        pool = new_pool(framework)
        sequence = pool.create(self.NUMBERS, salt=salt)
        for start in range(0, 300, 64):
            append(pool, framework, [sequence, None], [list(self.NUMBERS[start : start + 64]), []], 128)
        return pool, sequence

    @pytest.mark.parametrize("reuse", ["exact", "quantized"])
    @pytest.mark.parametrize("generated", [False, True])
    def test_pages_stay_within_a_salt(self, framework, reuse, generated):
        """No way of reuse crosses a salt; the same salt still finds all that is stored."""
        salts = [b"", b"adapter a", b"adapter b", b"\0", self.chain_of_a_page()]
        for own in salts:
            pool, _ = self.filled(framework, own)
            for salt in salts:
                found = pool.length(pool.create(self.NUMBERS, reuse=reuse, generated=generated, salt=salt))
                assert found == (256 if salt == own else 0), f"{own!r} asked for by {salt!r}"

    def chain_of_a_page(self) -> bytes:
        """A salt made of what the hash chain reads: no tokens may lead from one salt to another."""
        return np.arange(64, dtype=np.int64).tobytes()

    def test_forks_and_what_they_append_keep_the_salt(self, framework):
        """What a fork, a beam or a cut sequence stores is found under the salt of its parent only."""
        pool, parent = self.filled(framework, b"a")
        child = pool.fork(parent)
        (child,) = pool.reorder([child], [0])
        pool.truncate(child, 256)
        longer = [*self.NUMBERS[:256], *range(1000, 1128)]
        for start in (256, 320):
            append(pool, framework, [child, None], [longer[start : start + 64], []], 128)
        lengths = [pool.length(pool.create([*longer, 1], salt=salt)) for salt in (b"a", b"", b"b")]
        assert lengths == [384, 0, 0]

    def test_a_snapshot_keeps_the_salt(self, framework, tmp_path):
        """A restored sequence is found by its own tenant only, in a new pool too."""
        pool, sequence = self.filled(framework, b"tenant \xff")
        pool.snapshot(sequence, tmp_path / "s")
        other = new_pool(framework)
        other.restore(tmp_path / "s")
        assert other.pages.find_prefix(self.NUMBERS) is None
        prefix = other.pages.find_prefix(self.NUMBERS, salt=b"tenant \xff")
        assert prefix is not None and prefix.length == 256

    @pytest.mark.parametrize("salt", ["adapter", None, 1])
    def test_a_salt_is_bytes(self, framework, salt):
        with pytest.raises(errors(framework).ConfigError, match="allowed: bytes"):
            new_pool(framework).create(salt=salt)


# ------------------------------------------------------------ interruptions


class TestInterruptions:
    """An exception between `begin` and `finish`: the pool says how to go on, and goes on exactly."""

    PROMPT = list(range(20, 61)) * 12  # 492 tokens of the toy model

    def run(self, framework: Framework, layer: int | None, width: int) -> list[int]:
        """Greedy tokens; a forward is interrupted before `layer` attends, aborted, and done again."""
        model = ToyModel(framework, new_pool(framework, grid_tokens=64))
        pool, attend, calls = model.pool, model.attend, iter(range(10**6))
        sequence = pool.create()
        logits = model.run([sequence, None], [self.PROMPT[:460], []], 460)
        if layer is not None:

            def failing(*arguments: Any, **options: Any) -> Any:
                if next(calls) == layer:
                    raise KeyboardInterrupt
                return attend(*arguments, **options)

            before = stored(pool, framework, sequence)
            model.attend = failing
            with pytest.raises(KeyboardInterrupt):
                model.run([sequence, None], [self.PROMPT[460 : 460 + width], []], width)
            model.attend = attend
            busy = page_errors(framework).PageStateError
            for use in (
                lambda: pool.begin([sequence], counts=[1]),
                lambda: pool.fork(sequence),
                lambda: pool.view([sequence]),
                lambda: pool.snapshot(sequence, "never"),
            ):
                with pytest.raises(busy, match="abort"):
                    use()
            pool.abort()
            pool.pages.check()
            assert pool.length(sequence) == 460
            assert_equal(before, stored(pool, framework, sequence))
        logits = model.run([sequence, None], [self.PROMPT[460 : 460 + width], []], width)[0]
        return model.generate(sequence, logits, 4)

    @pytest.mark.parametrize("width", [1, 32])
    @pytest.mark.parametrize("layer", [0, 1])
    def test_an_interrupted_forward_is_aborted_exactly(self, framework, layer, width):
        """A token or a chunk that quantizes a page, interrupted before and between layers."""
        assert self.run(framework, layer, width) == self.run(framework, None, width)

    def test_a_full_pool_damages_by_name(self, framework, monkeypatch):
        """Without a page to spare, rows about to be quantized are written over: freed, nothing else."""
        pool = new_pool(framework, window_pages=3, int2_pages=8)
        first, other = pool.create(), pool.create()
        append(pool, framework, [first, None], [list(range(192)), []], 192)
        append(pool, framework, [other, None], [list(range(10)), []], 192)
        kept = stored(pool, framework, first), stored(pool, framework, other)
        pool.abort(pool.begin([first], counts=[128]), untouched=True)
        assert_equal(kept[0], stored(pool, framework, first))
        module, calls = framework.module("serving.sequence_pool"), iter(range(10))
        append_layer = module.append_layer

        def failing(*arguments: Any) -> Any:
            if next(calls) == 1:
                raise KeyboardInterrupt
            return append_layer(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(module, "append_layer", failing)
            with pytest.raises(KeyboardInterrupt):
                append(pool, framework, [first, None], [list(range(300, 428)), []], 192)
        with pytest.raises(page_errors(framework).PageStateError, match="free it and create it again"):
            pool.begin([first], counts=[1])
        assert_equal(kept[1], stored(pool, framework, other))
        pool.free(first)
        pool.pages.check()
        append(pool, framework, [other, None], [list(range(10, 150)), []], 192)
        assert_oracle(pool, framework, other, list(range(150)))

    def test_a_failure_inside_begin_leaves_no_step(self, framework, monkeypatch):
        pool = new_pool(framework)
        sequence = pool.create()
        write(pool, framework, sequence, list(range(100)))
        before = pool.statistics()

        def failing(*arguments: Any) -> Any:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(pool, "_views", failing)
            with pytest.raises(KeyboardInterrupt):
                pool.begin([sequence], counts=[100])
        assert pool.statistics().live_bytes == before.live_bytes
        pool.pages.check()
        pool.abort(pool.begin([sequence], counts=[100]))

    def test_nothing_to_abort_is_refused(self, framework):
        with pytest.raises(page_errors(framework).PageStateError, match="not the one in progress"):
            new_pool(framework).abort()

    def test_donated_views_of_a_failed_step_end_the_pool(self):
        """JAX only: what a compiled step has taken cannot be given back, and the pool says so."""
        jax = pytest.importorskip("jax")
        framework = FRAMEWORKS["jax"]
        pool = new_pool(framework)
        step = pool.begin([pool.create()], counts=[1])
        jax.jit(lambda caches: caches, donate_argnums=0)(step.caches)
        busy = page_errors(framework).PageStateError
        for use in (pool.abort, pool.create, lambda: pool.view([None]), lambda: pool.restore("never")):
            with pytest.raises(busy, match=r"layers \[0, 1\] were donated.*new SequencePool"):
                use()


# ------------------------------------------------------------ documents


def test_the_example_of_the_documentation_runs(framework):
    """The first lines of docs/serving.md, imports included, print what the page says, in both packages."""
    page = (ROOT / "docs" / "serving.md").read_text()
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    assert len(example.splitlines()) == 6 and "from oscar_torch import" in example
    rows = [framework.bfloat16(np.zeros((1, 500, 2, 64), np.uint16), "cpu")] * 4
    example = example.replace("oscar_torch", framework.package)
    printed: list[str] = []
    exec(example, {"rows": rows, "print": lambda *words: printed.append(" ".join(map(str, words)))})
    assert len(printed) == 1 and f"`{printed[0]}`" in page


def test_the_list_of_failures_names_existing_tests():
    """Failures are numbered from 1 without a gap, and every test named there exists."""
    folder = ROOT / "parity_tests"
    page = (folder / "README.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*$", page, re.MULTILINE)
    assert rows == [str(number) for number in range(1, len(rows) + 1)] and len(rows) >= 41
    named = re.findall(r"`((?:\w+/)*test_\w+\.py)::([\w:]+)`", page)
    assert named
    for file, path in named:
        bodies = [ast.parse(found.read_text()).body for found in folder.rglob(file)]
        for part in path.split("::"):
            bodies = [
                node.body
                for body in bodies
                for node in body
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
            ]
            assert bodies, f"{file}::{path} does not exist"


# ------------------------------------------------------------ random interleavings


@pytest.mark.parametrize(("name", "operations"), [("torch", 800), ("jax", 60)])
def test_random_operations(name, operations):
    """A short run of `parity_tests.conformance.stress`; the recorded one is in results/."""
    report = stress.run(name, operations, seed=100, per_world=60 if name == "jax" else None)
    assert report["operations"] >= operations
    assert report["reused_tokens"] > 0 and report["highest_fill_of_budget"] > 0.5


class Machine(RuleBasedStateMachine):
    """The operations of the stress test, chosen and shrunk by hypothesis, on Torch arrays."""

    @initialize(world=st.sampled_from(stress.WORLDS))
    def start(self, world):
        self.harness = stress.Harness(FRAMEWORKS["torch"], world, 0)
        self.prompts: dict[int, list[int]] = {}

    def pick(self, index: int) -> int | None:
        living = list(self.harness.model)
        return living[index % len(living)] if living else None

    @rule(
        blocks=st.lists(st.booleans(), max_size=8),
        tail=st.integers(0, 63),
        generated=st.booleans(),
        reuse=st.sampled_from(["exact", "quantized", None]),
        salt=st.sampled_from(stress.SALTS),
    )
    def create(self, blocks, tail, generated, reuse, salt):
        if len(self.harness.model) < 8:
            prompt = [7 * block + i for block in [*blocks, False] for i in range(64)][
                : 64 * len(blocks) + tail
            ]
            self.prompts[self.harness.create(prompt, reuse, generated, salt)] = prompt

    @rule(chosen=st.lists(st.integers(0, 7), unique=True, min_size=1, max_size=4), data=st.data())
    def append(self, chosen, data):
        batch: list[int | None] = list({self.pick(index): None for index in chosen})
        batch += [None] * (4 - len(batch))
        tokens: list[list[int]] = []
        for sequence in batch:
            length = len(self.harness.model[sequence].rows) if sequence is not None else 0
            count = data.draw(st.sampled_from([1, 64 - length % 64, 2, 130])) if sequence is not None else 0
            count = min(count, self.harness.world.max_length - length)
            prompt = self.prompts.get(sequence, []) if sequence is not None else []
            new = prompt[length : length + count]
            tokens.append(new if new else [3] * count)
        interrupt = data.draw(st.sampled_from([None, None, None, 0, 1]))
        self.harness.append(batch, tokens, known=data.draw(st.integers(0, 9)) > 0, interrupt=interrupt)

    @rule(index=st.integers(0, 7))
    def fork(self, index):
        sequence = self.pick(index)
        if sequence is not None and len(self.harness.model) < 10:
            self.harness.fork(sequence)

    @rule(index=st.integers(0, 7), cut=st.integers(0, 300), keep=st.booleans())
    def truncate(self, index, cut, keep):
        sequence = self.pick(index)
        if sequence is not None:
            self.harness.truncate(sequence, max(0, len(self.harness.model[sequence].rows) - cut), keep)

    @rule(index=st.integers(0, 7))
    def free(self, index):
        sequence = self.pick(index)
        if sequence is not None:
            self.harness.free(sequence)

    @rule(index=st.integers(0, 7))
    def snapshot(self, index):
        sequence = self.pick(index)
        if sequence is not None:
            self.harness.snapshot(sequence)

    @rule(index=st.integers(0, 7), count=st.sampled_from([1, 64, 130]))
    def abort(self, index, count):
        sequence = self.pick(index)
        if sequence is not None:
            room = self.harness.world.max_length - len(self.harness.model[sequence].rows)
            self.harness.abort(sequence, min(count, room))

    @rule(sources=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def reorder(self, sources):
        beams = list(self.harness.model)[:3]
        if beams:
            self.harness.reorder(beams, [source % len(beams) for source in sources])

    def teardown(self):
        if hasattr(self, "harness"):
            self.harness.end()


Machine.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=(HealthCheck.too_slow,),
)
TestMachine = Machine.TestCase


def test_every_kind_of_operation_is_in_the_stress_test():
    """The driver reaches every operation, also the refusals."""
    harness = stress.Harness(FRAMEWORKS["torch"], stress.WORLDS[0], 1)
    driver = stress.Driver(harness, 1)
    for _ in range(500):
        driver.step()
    harness.end()
    assert set(harness.counts) >= {
        "abort", "append, chunk", "append, interrupted", "append, one token",
        "append, refused", "create, empty", "create, resumed",
        "fork", "free", "reorder", "truncate, exact", "truncate, quantized kept", "truncate, refused",
    }  # fmt: skip
    assert isinstance(harness.counts, Counter)
