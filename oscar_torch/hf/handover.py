"""What one function that transformers calls leaves for the next, per thread.

`Cache.update` announces its layer to the attention function, which gets the keys but no cache;
`get_mask_sizes` announces it to the mask function.
"""

import threading
import weakref
from typing import Any

from torch import Tensor

from ..core.errors import ConfigError

# A layer here is an OscarLayer, whose file imports this one.

_handover = threading.local()


def interrupted(columns: int) -> ConfigError:
    """The refusal of a step after one that an exception ended, before which there were `columns` columns."""
    back = f"crop({columns}), which goes back to before it, or " if columns else ""
    return ConfigError(f"an exception interrupted a step, layers have parts of it; allowed: {back}reset()")


def announce(layer: Any, key: Tensor) -> None:
    """Notes that the attention over `key` is that of `layer`.

    Raises ConfigError where an earlier layer still waits for its attention: the model computes it by itself,
    over the new keys alone.
    """
    waiting = getattr(_handover, "layer", None)
    if waiting is not None and waiting.layer_id < layer.layer_id:
        forget_handover()
        raise ConfigError(
            f"attention of layer {waiting.layer_id} did not go through transformers' attention interface, "
            "allowed: models whose attention does (nothing is stored)"
        )
    _handover.layer, _handover.key, _handover.masked = layer, key, False


def take_announced(key: Tensor) -> Any:
    """The layer whose `update` returned `key`, once; None if no OscarCache did.

    Raises ConfigError where an update came, but with other keys: a model that changes them afterwards.
    """
    layer, announced = getattr(_handover, "layer", None), getattr(_handover, "key", None)
    _handover.layer = _handover.key = None
    if layer is None or announced is None:
        return None
    if announced.data_ptr() != key.data_ptr() or announced.shape != key.shape:
        raise ConfigError(
            f"layer {layer.layer_id} stores keys {tuple(announced.shape)}, but attention got others, "
            f"{tuple(key.shape)}; allowed: the keys that OscarCache.update returned"
        )
    return layer


def request_mask(layer: Any, columns: int | Tensor, new_columns: int) -> None:
    """Notes that the next mask is for an OscarCache, which the mask function is not told."""
    _handover.mask = (weakref.ref(layer), columns, new_columns)


def take_mask_request(columns: int | Tensor, new_columns: int) -> Any:
    """The layer that was just asked for the sizes of a mask over `columns` and `new_columns`, once."""
    request = getattr(_handover, "mask", None)
    _handover.mask = None
    if request is None or request[1:] != (columns, new_columns):
        return None
    return request[0]()


def note_window(window: int | None) -> None:
    """Notes that the model made a mask with this window; the masks of a step come before its attention."""
    if not getattr(_handover, "masked", False):
        _handover.windows, _handover.masked = set(), True
    _handover.windows.add(window)


def require_window(window: int | None, columns: int) -> None:
    """Raises ConfigError where `columns` reach beyond a window that only configuration or masks have."""
    windows = getattr(_handover, "windows", None)
    if not windows or window in windows:
        return
    reach = min(w for w in (window, *windows) if w is not None)
    if columns > reach:
        given = f"sliding_window = {window} in the configuration, which the model's masks leave out"
        if window is None or None not in windows:
            given = f"sliding_window = {window} in the configuration, {sorted(windows, key=str)} in the masks"
        raise ConfigError(
            f"{columns} columns with {given}, allowed: up to {reach} columns, or a configuration that says "
            "what the model does"
        )


def forget_handover() -> None:
    """Drops an announcement that no attention call has taken."""
    _handover.layer = _handover.key = None
