"""Models that are not as they were loaded: with low-rank adapters, or spread by a device map."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from oscar_torch.core.rotation_header import FINGERPRINT_FIELD  # noqa: E402
from oscar_torch.hf import OscarCache  # noqa: E402
from oscar_torch.hf.fingerprint import model_fingerprint  # noqa: E402
from parity_tests.hf.tiny import (  # noqa: E402
    generate,
    left_padded,
    make_cache,
    make_model,
    make_rotations,
    prompts,
)

pytestmark = pytest.mark.hf

MODES = ({}, {"max_length": 420})


class LowRank(torch.nn.Module):
    """What PEFT puts in the place of a projection: the base layer and a product of two thin matrices."""

    def __init__(self, base_layer, rank=4):
        super().__init__()
        self.base_layer = base_layer
        self.down = torch.nn.Parameter(torch.randn(rank, base_layer.in_features) * 0.2)
        self.up = torch.nn.Parameter(torch.randn(base_layer.out_features, rank) * 0.2)

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, rows):
        return self.base_layer(rows) + rows @ self.down.T @ self.up.T


class Wrapped(torch.nn.Module):
    """Around the whole model, as PEFT's class: what it lacks it takes from the model within."""

    def __init__(self, base_model):
        super().__init__()
        self.base_model = base_model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)


@pytest.mark.parametrize("options", MODES)
def test_an_adapter_equals_merged_weights(options):
    """On queries, keys, values and the MLP; the rotations are those of the base model's weights."""
    model = make_model("qwen3")
    base = model_fingerprint(model)
    merged = copy.deepcopy(model)
    torch.manual_seed(2)
    with torch.no_grad():
        for layer, other in zip(model.model.layers, merged.model.layers):
            for parent, twin, names in (
                (layer.self_attn, other.self_attn, ("q_proj", "k_proj", "v_proj")),
                (layer.mlp, other.mlp, ("up_proj",)),
            ):
                for name in names:
                    adapter = LowRank(getattr(parent, name))
                    setattr(parent, name, adapter)
                    getattr(twin, name).weight += adapter.up @ adapter.down
    ids, mask = left_padded(prompts(378, 130))
    adapted = Wrapped(model).eval()
    extra = {FINGERPRINT_FIELD: base}
    cache = OscarCache(make_rotations(model.config, model_id="other", extra=extra), adapted, **options)
    found = generate(adapted, ids, cache, 12, attention_mask=mask)
    expected = generate(merged, ids, make_cache(merged), 12, attention_mask=mask)
    assert torch.equal(found.sequences, expected.sequences)
    # Products in another order, whose rows may round to the neighbouring bf16 number.
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=0.02, rtol=1e-2)
    plain = generate(make_model("qwen3"), ids, make_cache(model), 12, attention_mask=mask)
    assert not torch.equal(plain.sequences, expected.sequences)


@pytest.mark.parametrize("options", MODES)
def test_a_device_map_changes_nothing(options):
    """accelerate's hooks around every layer move tensors before attention sees them."""
    accelerate = pytest.importorskip("accelerate")
    model, spread = make_model("gemma3"), make_model("gemma3")
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "cpu"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    spread = accelerate.dispatch_model(spread, device_map=places, main_device="cpu", force_hooks=True)
    assert hasattr(spread.model.layers[1], "_hf_hook")
    ids, mask = left_padded(prompts(378, 130))
    expected = generate(model, ids, make_cache(model), 12, attention_mask=mask).sequences
    cache = make_cache(spread, **options)
    assert torch.equal(generate(spread, ids, cache, 12, attention_mask=mask).sequences, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("options", MODES)
def test_layers_on_two_gpus(options):
    """Each layer's pages lie where its weights do, and its kernels run there."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    accelerate = pytest.importorskip("accelerate")
    model = make_model("qwen3", head_dim=64).to("cuda", torch.bfloat16)
    ids, mask = (x.to("cuda") for x in left_padded(prompts(378, 130)))
    expected = generate(model, ids, make_cache(model), 12, attention_mask=mask)
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1}
    places |= {"model.norm": 1, "model.rotary_emb": 0, "lm_head": 1}
    spread = accelerate.dispatch_model(model, device_map=places)
    cache = make_cache(spread, **options)
    found = generate(spread, ids, cache, 12, attention_mask=mask)
    assert [layer.store.lengths.device.index for layer in cache.layers] == [0, 1]
    torch.testing.assert_close(found.logits[0].cpu(), expected.logits[0].cpu(), atol=0.05, rtol=0.01)
