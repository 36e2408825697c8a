"""A pool per rank of a tensor-parallel engine: its bytes are one pool's, cut by heads."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from oscar_torch.core import cache_format as fmt  # noqa: E402
from oscar_torch.core.config import CacheConfig  # noqa: E402
from oscar_torch.core.errors import CheckpointError, ConfigError, ShapeError  # noqa: E402
from oscar_torch.rotations.head_shard import HeadShard  # noqa: E402
from oscar_torch.rotations.rotation import hadamard_rotation  # noqa: E402
from oscar_torch.serving.sequence_pool import SequencePool  # noqa: E402
from parity_tests.conformance.frameworks import FRAMEWORKS  # noqa: E402
from parity_tests.conformance.rows import make_rotation, mixed_rows  # noqa: E402

CONFIG = CacheConfig(num_key_value_heads=4, num_query_heads=8, head_dim=16, sink_tokens=64, recent_tokens=64)
RANKS = 2


def shards(query_heads=8, heads=4, ranks=RANKS, replicated=False):
    return [HeadShard(rank, ranks, query_heads, heads, replicated) for rank in range(ranks)]


def pool_of(shard, rotations):
    """The pool of a rank, or the whole one."""
    config, name = CONFIG, "toy"
    if shard is not None:
        config, name = shard.config(config), shard.model_id(name)
        rotations = [shard.rotation(rotation) for rotation in rotations]
    return SequencePool([config] * len(rotations), rotations, model_id=name, max_length=512, max_sequences=3)


def fill(pool, heads):
    """Two sequences of 250 and 200 tokens, then one decoding step; shared rotations in the second layer."""
    bank = mixed_rows(np.random.default_rng(7), (2048, CONFIG.num_key_value_heads, CONFIG.head_dim))
    rows = FRAMEWORKS["torch"].bfloat16(bank.reshape(2, 2, 2, 256, *bank.shape[1:]), "cpu")
    rows = rows[..., heads.start : heads.stop, :]  # [layers, roles, sequences, tokens, heads, channels]
    sequences = [pool.create(), pool.create()]
    pool.append(sequences, list(rows[:, 0, :, :250]), list(rows[:, 1, :, :250]), counts=[250, 200])
    pool.append(sequences, list(rows[:, 0, :, 250:251]), list(rows[:, 1, :, 250:251]), counts=[1, 1])
    return sequences


@pytest.fixture(scope="module")
def rotations():
    own = make_rotation(np.random.default_rng(3), CONFIG.num_key_value_heads, CONFIG.head_dim)
    return [FRAMEWORKS["torch"].layer_rotation(own, "cpu"), hadamard_rotation(1, CONFIG.head_dim)]


def test_pools_of_ranks_hold_the_bytes_of_one(rotations, tmp_path):
    whole = pool_of(None, rotations)
    sequences = fill(whole, range(4))
    pools = [pool_of(shard, rotations) for shard in shards()]
    for pool, shard in zip(pools, shards()):
        assert fill(pool, shard.heads) == sequences
        assert pool.statistics().live_bytes * RANKS == whole.statistics().live_bytes
    for sequence in sequences:
        for layer in range(2):
            expected = whole.sequence_arrays(sequence, layer)
            parts = [pool.sequence_arrays(sequence, layer) for pool in pools]
            assert len(expected["key_codes"]) == 1
            for name in (*fmt.INT2_ARRAYS, *fmt.WINDOW_ARRAYS):
                found = torch.cat([part[name] for part in parts], dim=1)
                assert torch.equal(found.view(torch.uint8), expected[name].view(torch.uint8))  # NaN too
    pools[0].snapshot(sequences[0], tmp_path / "first")
    assert pools[0].length(pools[0].restore(tmp_path / "first")) == 251
    with pytest.raises(CheckpointError, match=r"heads 0\.\.1 of 4"):
        pools[1].restore(tmp_path / "first")


@pytest.mark.parametrize(
    ("query_heads", "heads", "ranks", "own"),
    [
        (8, 1, 2, [range(0, 1), range(0, 1)]),
        (8, 2, 4, [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]),
        (8, 4, 2, [range(0, 2), range(2, 4)]),
    ],
)
def test_replicated_heads(query_heads, heads, ranks, own):
    """Every rank keeps the key/value heads of its query heads."""
    assert [shard.heads for shard in shards(query_heads, heads, ranks, replicated=True)] == own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2, 8, 4), "rank = 2 of 2, allowed"),
        ((0, 2, 8, 3), "num_query_heads = 8 is not a multiple of num_key_value_heads = 3"),
        ((0, 3, 8, 4), "num_query_heads = 8 over 3 ranks"),
        ((0, 2, 8, 1), "num_key_value_heads = 1 over 2 ranks, allowed: a multiple of the ranks, or"),
        ((1, 4, 36, 3, True), "query heads 9..17 of rank 1 share key.value heads 0..1 unevenly, 12 to each"),
    ],
)
def test_heads_that_cannot_be_split_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        HeadShard(*arguments)


def test_a_shard_of_another_model_is_refused(rotations):
    shard = HeadShard(0, 2, 4, 2)
    for call in (lambda: shard.config(CONFIG), lambda: shard.rotation(rotations[0])):
        with pytest.raises(ShapeError, match="4 key/value heads, this is a shard of 2"):
            call()
