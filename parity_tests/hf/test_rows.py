"""Ring attention through Torch's kernels against the float32 reference."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from oscar_torch import attention  # noqa: E402
from oscar_torch.cache import allocate_dense_cache, append_rows  # noqa: E402
from oscar_torch.hf.rows import ring_attention  # noqa: E402
from parity_tests.hf.tiny import GEOMETRY  # noqa: E402

pytestmark = pytest.mark.hf


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("lengths", [(0, 3, 40), (100, 130, 500)])
def test_ring_attention_is_the_reference(lengths, sinks):
    """Rings that are empty, part full, written around often; ragged chunks, one token, sink logits."""
    generator = torch.Generator().manual_seed(1)

    def rows(tokens, heads):
        return torch.randn(3, tokens, heads, 16, generator=generator)

    ring = allocate_dense_cache(GEOMETRY, 3, 10_000, window=164)
    history = rows(500, 2), rows(500, 2)
    append_rows(ring, None, *history, torch.tensor(lengths, dtype=torch.int32))
    options = {
        "softmax_scale": 0.25,
        "sliding_window": 100,
        "sink_logits": torch.randn(4, generator=generator) if sinks else None,
    }
    query, key, value = rows(150, 4), rows(150, 2), rows(150, 2)
    new_lengths = torch.tensor([150, 1, 90], dtype=torch.int32)
    expected = attention.chunk_attention(query, key, value, ring, None, new_lengths=new_lengths, **options)
    found = ring_attention(query, key, value, ring, new_lengths=new_lengths, **options)
    for b, count in enumerate(new_lengths.tolist()):
        torch.testing.assert_close(found[b, :count], expected[b, :count], atol=1e-5, rtol=1e-5)
    append_rows(ring, None, key, value, new_lengths)
    expected = attention.decode_attention(query[:, 0], ring, None, **options)
    found = ring_attention(query[:, :1], None, None, ring, new_lengths=None, **options)[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.isfinite(found).all()
