"""Likelihoods and continuations of a transformers model: those of single tokens through the cache."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from oscar_torch.core.config import CacheConfig  # noqa: E402
from oscar_torch.core.errors import ConfigError  # noqa: E402
from oscar_torch.hf.cache import OscarCache  # noqa: E402
from oscar_torch.hf.calibrate import load_model  # noqa: E402
from oscar_torch.hf.scorer import Bfloat16Cache, Scorer, decoding_chunks  # noqa: E402
from oscar_torch.rotations.store import save_safetensors  # noqa: E402
from parity_tests.hf.tiny import make_rotations, with_cache  # noqa: E402
from parity_tests.models.tiny_model import write_tiny_model  # noqa: E402

pytestmark = pytest.mark.hf
GEOMETRY = CacheConfig(2, 4, 32)
CLOSE = 5e-3  # sums of ten float32 log-probabilities of order 50, products in another order
CONTEXT = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(470))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """Model, tokenizer and a folder with rotations that need no fit."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)
    model, tokenizer = load_model(folder, dtype="float32")
    rotations = make_rotations(model.config)
    save_safetensors(rotations, folder / "rotations.safetensors")
    return model, tokenizer, folder


@torch.no_grad()
def decoded(model: Any, cache: Any, tokens: list[int]) -> Any:
    """Log-probabilities [T, V] after every token, each of them a decoding step."""
    model.set_attn_implementation("oscar" if isinstance(cache, OscarCache) else "sdpa")
    logits = [model(torch.tensor([[token]]), **with_cache(model, cache)).logits[0, 0] for token in tokens]
    return torch.stack(logits).log_softmax(dim=-1)


def test_chunks_read_the_pages_of_their_last_position() -> None:
    """Everywhere, and a page costs two of them; without INT2 pages only their size bounds them."""
    for length in (1, 128, 383, 384, 700, 1100):
        chunks = list(decoding_chunks(length, GEOMETRY))
        assert [start for start, _ in chunks] == [0, *(end for _, end in chunks)][:-1]
        assert chunks[-1][1] == length
        for start, end in chunks:
            held = GEOMETRY.history_pages(start if end - start > 1 else start + 1)
            assert {GEOMETRY.history_pages(p + 1) for p in range(start, end)} == {held}
    assert list(decoding_chunks(512, GEOMETRY))[3:] == [
        (383, 384),
        (384, 447),
        (447, 448),
        (448, 511),
        (511, 512),
    ]
    assert list(decoding_chunks(300, None)) == [(0, 128), (128, 256), (256, 300)]


@pytest.mark.parametrize("method", ["int2", "bf16"])
def test_likelihoods_and_continuations_are_those_of_decoding(
    loaded: tuple[Any, Any, Path], method: str
) -> None:
    model, tokenizer, folder = loaded
    rotations = make_rotations(model.config)
    scorer = Scorer((model, tokenizer), method=method, rotations=folder / "rotations.safetensors", batch=2)

    def new_cache() -> Any:
        return OscarCache(rotations, model) if method == "int2" else Bfloat16Cache(config=model.config)

    context, continuation = CONTEXT + " ", "and so on"
    tokens = scorer.encode(context + continuation)
    assert tokens[0] == 256 and len(tokens) == 1 + 470 + 10
    cache = new_cache()
    log_p = decoded(model, cache, tokens)
    value = log_p[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    short, long, bare = scorer.loglikelihood([("a", "b"), (context, continuation), ("", "ab")])
    assert long[0] == pytest.approx(float(value[-10:].sum()), abs=CLOSE)
    early = decoded(model, new_cache(), scorer.encode("ab"))
    first, second = (float(early[place, token]) for place, token in enumerate(scorer.encode("ab")[1:]))
    assert short[0] == pytest.approx(second, abs=CLOSE) and bare[0] == pytest.approx(
        first + second, abs=CLOSE
    )
    best = chr(33 + int(log_p[-1, 33:127].argmax()))
    (likeliest,) = scorer.loglikelihood([(context + continuation, best)])
    token = scorer.encode(best)[1]
    assert likeliest[0] == pytest.approx(float(log_p[-1, token]), abs=CLOSE)
    assert likeliest[1] == (int(log_p[-1].argmax()) == token)
    rolled = scorer.loglikelihood_rolling([context + continuation, "ab"])
    assert rolled == pytest.approx([float(value.sum()), bare[0]], abs=10 * CLOSE)
    assert (0 < scorer.int2_share < 0.3) if method == "int2" else scorer.int2_share == 0

    asked = [context + continuation, "a"]
    made = scorer.generate_until([(prompt, {"until": [], "max_gen_toks": 5}) for prompt in asked])
    text: list[int] = []
    for _ in range(5):
        text.append(int(log_p[-1].argmax()))
        log_p = decoded(model, cache, text[-1:])
    assert made[0] == tokenizer.decode(text, skip_special_tokens=True)
    stop = {"until": made[0][2], "max_gen_toks": 5}
    assert scorer.generate_until([(prompt, stop) for prompt in asked])[0] == made[0].split(made[0][2])[0]


def test_what_cannot_be_served_is_refused(loaded: tuple[Any, Any, Path]) -> None:
    """By name, with what is allowed; a method's fit needs the statistics."""
    model, tokenizer, folder = loaded
    given = (model, tokenizer)
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"method": "kivi"}, "method 'kivi', allowed: bf16, int2"),
        ({"method": "int2:none", "rotations": folder}, "basis 'none', allowed: channel_balanced"),
        ({"method": "int2"}, "'int2' needs rotations"),
        ({"method": "int2:sequential", "rotations": folder}, "fitted to calibration statistics"),
        ({"method": "bf16", "batch": 0}, "batch = 0"),
        ({"method": "bf16", "max_length": 5000}, "4096 positions"),
    )
    for options, message in cases:
        with pytest.raises(ConfigError, match=message):
            Scorer(given, **options)
