"""Launches that a layer makes at every step: prepared once, then made past Triton's dispatcher.

To find a compiled kernel Triton looks at type and alignment of every argument: 20 us for thirty of them, and
there are four or five launches to a layer and step. All but a few arguments are arrays of the layer's cache:
what was found for them stays right as long as they are the same arrays.
"""

from collections.abc import Callable
from typing import Any

import torch

ALIGNMENT = 16  # bytes, by which Triton tells pointers apart


class Launch:
    """A kernel with fixed arguments, and `changing` ones that every call gives as tensors, in that order.

    The changing tensors must have the same dtypes every time. One that is not aligned sends the launch
    through the dispatcher.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        changing: tuple[str, ...],
        fixed: dict[str, Any],
        **options: Any,
    ) -> None:
        self.kernel, self.options = kernel, options
        self.grid = (*grid, 1, 1)[:3]
        self.changing, self.fixed = changing, fixed
        self.places = [kernel.arg_names.index(name) for name in changing]
        self.values = [fixed.get(name) for name in kernel.arg_names]
        self.run: Callable[..., None] | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Launches; returns the compiled kernel where Triton was asked for it, else None."""
        if self.run is None or any(tensor.data_ptr() % ALIGNMENT for tensor in tensors):
            arguments = self.fixed | dict(zip(self.changing, tensors, strict=True))
            compiled = self.kernel[self.grid](**arguments, **self.options)
            if compiled is not None and not any(tensor.data_ptr() % ALIGNMENT for tensor in tensors):
                self.run = compiled[self.grid]
            return compiled
        values = self.values.copy()
        for place, tensor in zip(self.places, tensors):
            values[place] = tensor
        self.run(*values)
        return None


def remembered[Made](cache: Any, rotation: Any, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
    """What `make` returned for this key, as long as the cache has the same arrays and the same rotation.

    It is kept on the cache, beside its fields: another cache object starts anew.
    """
    arrays = (
        rotation, cache.key_codes, cache.value_codes, cache.key_scale, cache.value_scale, cache.key_page_mean,
        cache.window_key, cache.window_value, cache.page_table, cache.window_table, cache.lengths,
        cache.history_pages,
    )  # fmt: skip
    if cache.launches is None or any(a is not b for a, b in zip(cache.launches[0], arrays)):
        cache.launches = (arrays, {})
    made = cache.launches[1]
    if key not in made:
        made[key] = make()
    return made[key]
