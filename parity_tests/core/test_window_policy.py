"""Which layers keep a BF16 ring: the limit itself, every layer, refusals."""

import re

import pytest

from oscar_torch.core.errors import ConfigError
from oscar_torch.core.window_policy import DEFAULT_WINDOW_POLICY, EVERY_LAYER_INT2, WindowPolicy

WINDOWS = (None, 1, 512, 1023, 1024, 1025, 4096)


@pytest.mark.parametrize(
    ("policy", "layers"),
    [
        (DEFAULT_WINDOW_POLICY, (0, 5, 6)),
        (EVERY_LAYER_INT2, (0, 1, 2, 3, 4, 5, 6)),
        (WindowPolicy(512), (0, 3, 4, 5, 6)),
        (WindowPolicy(4096), (0,)),
    ],
)
def test_int2_layers(policy: WindowPolicy, layers: tuple[int, ...]) -> None:
    """A window equal to the limit still is a ring; a layer without a window never is."""
    assert policy.int2_layers(WINDOWS) == layers
    assert [policy.keeps_ring(w) for w in WINDOWS] == [i not in layers for i in range(len(WINDOWS))]


@pytest.mark.parametrize("limit", [-1, 1.5, True, None, "1024"])
def test_refusals(limit: object) -> None:
    """Anything that is no number of tokens is refused with the value."""
    with pytest.raises(ConfigError, match=re.escape(f"ring_window = {limit!r}, allowed")):
        WindowPolicy(limit)  # type: ignore[arg-type]
