"""Behind a sliding window INT2 pages are given up: the answers stay those of a cache that keeps them all."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from parity_tests.conformance import oracle, rows
from parity_tests.conformance.frameworks import Framework

WINDOW, HEAD_DIM, LENGTH = 330, 32, 1500
OPTIONS = {"softmax_scale": HEAD_DIM**-0.5, "sliding_window": WINDOW}


def caches(framework: Framework, chunk: int = 512) -> tuple[Any, Any, Any]:
    """(the module, a cache that gives pages up, one that keeps them) for two sequences."""
    module = framework.module("cache")
    config = framework.module("core.config").CacheConfig(1, 2, HEAD_DIM)
    given_up = dataclasses.replace(config, window=WINDOW)
    return (
        module,
        module.allocate_layer_cache(given_up, 2, LENGTH, chunk=chunk),
        module.allocate_layer_cache(config, 2, LENGTH),
    )


def test_pages_behind_the_window_are_taken_again(framework: Framework) -> None:
    """48: chunks and single tokens over many turns of the pages; bytes and attention as with all pages."""
    module, few, all_pages = caches(framework)
    own = -(-512 // 64)  # of each sequence: one append, which is more than a window of 330 reaches
    assert few.key_codes.shape[0] == 1 + 2 * own < all_pages.key_codes.shape[0]
    rng = np.random.default_rng(0)
    rotation = framework.layer_rotation(rows.make_rotation(rng, 1, HEAD_DIM), "cpu")
    attend = framework.compiled(module.attend, "softmax_scale", "sliding_window")
    for tokens, counts in [(512, (512, 500)), (448, (448, 100)), (1, (1, 1)), (448, (448, 448)), (1, (1, 0))]:
        shapes = {"query": (2, tokens, 2, HEAD_DIM), "key": (2, tokens, 1, HEAD_DIM)}
        query = framework.array(rng.normal(0, 1, shapes["query"]).astype(np.float32), "cpu")
        key, value = (
            framework.bfloat16(oracle.to_bfloat16(rng.normal(0, 1, shapes["key"])), "cpu") for _ in "kv"
        )
        new = framework.array(np.array(counts, np.int32), "cpu")
        outs = []
        for cache in (few, all_pages):
            out, cache = attend(query, key, value, cache, rotation, new_lengths=new, **OPTIONS)
            outs.append(framework.numpy(out))
            few, all_pages = (cache, all_pages) if len(outs) == 1 else (few, cache)
        for b, count in enumerate(counts):
            assert (outs[0][b, :count] == outs[1][b, :count]).all()
    assert framework.numpy(few.lengths).tolist() == [1410, 1049]
    sizes = [module.live_bytes(cache) for cache in (few, all_pages)]
    assert sizes[0]["int2_pages"] == 2 * own < sizes[1]["int2_pages"]
    assert sizes[0]["bfloat16"] == 2 * WINDOW * HEAD_DIM * 4, "against what a BF16 ring keeps"


def test_what_needs_all_pages_is_refused(framework: Framework) -> None:
    module, few, _ = caches(framework)
    errors = framework.module("core.errors")
    rotation = framework.layer_rotation(rows.make_rotation(np.random.default_rng(0), 1, HEAD_DIM), "cpu")
    row = framework.array(np.zeros((2, 1500, 1, HEAD_DIM), np.float32), "cpu")
    one = framework.array(np.ones(2, np.int32), "cpu")
    query = framework.array(np.zeros((2, 2, HEAD_DIM), np.float32), "cpu")
    decode = framework.module("attention").decode_attention
    for window in (None, WINDOW + 1):
        with pytest.raises(errors.ConfigError, match=r"allowed: 1\.\.330, which the cache keeps"):
            decode(query, few, rotation, softmax_scale=1.0, sliding_window=window)
    with pytest.raises(errors.ShapeError, match=r"a chunk of 513 tokens, allowed: 1\.\.512"):
        module.append_rows(few, rotation, row[:, :513], row[:, :513], one)
    with pytest.raises(errors.ConfigError, match="an allocator keeps all pages"):
        module.allocate_layer_cache(few.config, 2, LENGTH, num_pages=9)
    with pytest.raises(errors.ConfigError, match="window = 0"):
        dataclasses.replace(few.config, window=0)
    short = module.allocate_layer_cache(few.config, 1, 100)  # whose table has one page: none is given up
    short = module.append_rows(short, rotation, row[:1, :100], row[:1, :100], 100 * one[:1])
    assert framework.numpy(short.lengths).tolist() == [100]
    for _ in range(3):
        few = module.append_rows(few, rotation, row[:, :450], row[:, :450], 450 * one)
    with pytest.raises(errors.OscarError, match=r"given up INT2 pages 0\.\.7 of 16"):
        module.read_layer_cache(few, rotation, 0)
