"""Both packages behind one face: arrays from and to NumPy, caches of either."""

import dataclasses
import functools
import importlib
import importlib.util
import platform
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from parity_tests.conformance import oracle

BFLOAT16_FIELDS = ("value_mean", "key_mean")
DEVICES = ("cpu", "gpu")


class Framework:
    """Array conversions of one package; subclasses know one framework each."""

    name: str
    package: str
    reference: str  # what the package calls its reference implementation

    def module(self, name: str) -> Any:
        """Module `name` of the package, e.g. "cache"."""
        return importlib.import_module(f"{self.package}.{name}")

    def installed(self) -> bool:
        """Whether the framework can be imported, found out without importing it."""
        return importlib.util.find_spec(self.name) is not None

    def why_not(self, device: str) -> str | None:
        """None when `device` can be used, otherwise the reason."""
        if device not in DEVICES:
            return f"device {device!r} is unknown, allowed: {', '.join(DEVICES)}"
        if not self.installed():
            return f"{self.name} is not installed"
        return None if device == "cpu" or self.has_gpu() else f"{self.name} sees no GPU"

    def has_gpu(self) -> bool:
        raise NotImplementedError

    def place(self, device: str) -> Any:
        """The framework's own name for `device`."""
        raise NotImplementedError

    def array(self, values: np.ndarray, device: str) -> Any:
        """A framework array of the same dtype and shape on `device`."""
        raise NotImplementedError

    def bfloat16(self, bits: np.ndarray, device: str) -> Any:
        """A bf16 array of these bits on `device`."""
        raise NotImplementedError

    def numpy(self, array: Any) -> np.ndarray:
        """A NumPy array; bf16 arrives as its bits (uint16)."""
        raise NotImplementedError

    def device_context(self, device: str) -> Any:
        """Context in which new arrays are made on `device`."""
        raise NotImplementedError

    def versions(self, device: str) -> dict[str, str]:
        """Versions and device name for the report."""
        raise NotImplementedError

    def compiled(self, function: Callable[..., Any], *static: str) -> Callable[..., Any]:
        """The function as users of this framework run it."""
        return function

    def layer_rotation(self, fields: Mapping[str, np.ndarray], device: str) -> Any:
        """The package's LayerRotation of arrays by field name (`rows.make_rotation`)."""
        arrays = {
            name: self.bfloat16(field, device) if name in BFLOAT16_FIELDS else self.array(field, device)
            for name, field in fields.items()
        }
        return self.module("rotations.rotation").LayerRotation(**arrays)


class JaxFramework(Framework):
    """JAX arrays; functions run under jit."""

    name, package, reference = "jax", "oscar_jax", "xla"

    @functools.cache  # noqa: B019  (one instance lives as long as the process)
    def has_gpu(self) -> bool:
        import jax

        try:
            return bool(jax.devices("gpu"))
        except RuntimeError:
            return False

    def place(self, device: str) -> Any:
        import jax

        return jax.devices(device)[0]

    def device_context(self, device: str) -> Any:
        import jax

        return jax.default_device(self.place(device))

    def array(self, values: np.ndarray, device: str) -> Any:
        import jax

        return jax.device_put(values, self.place(device))

    def bfloat16(self, bits: np.ndarray, device: str) -> Any:
        import ml_dtypes

        return self.array(np.ascontiguousarray(bits).view(ml_dtypes.bfloat16), device)

    def numpy(self, array: Any) -> np.ndarray:
        values = np.asarray(array)
        return values.view(np.uint16) if values.dtype.name == "bfloat16" else values

    def versions(self, device: str) -> dict[str, str]:
        import jax

        name = processor_name() if device == "cpu" else self.place(device).device_kind
        return {"jax": jax.__version__, "device": name}

    def compiled(self, function: Callable[..., Any], *static: str) -> Callable[..., Any]:
        return _jitted(function, static)


@functools.cache
def _jitted(function: Callable[..., Any], static: tuple[str, ...]) -> Callable[..., Any]:
    import jax

    return jax.jit(function, static_argnames=static)


class TorchFramework(Framework):
    """Torch tensors; functions run eagerly and without gradients."""

    name, package, reference = "torch", "oscar_torch", "eager"

    @functools.cache  # noqa: B019  (one instance lives as long as the process)
    def has_gpu(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def place(self, device: str) -> str:
        return "cuda" if device == "gpu" else device

    def device_context(self, device: str) -> Any:
        import torch

        return torch.device(self.place(device))

    def array(self, values: np.ndarray, device: str) -> Any:
        import torch

        return torch.from_numpy(np.array(values)).to(self.place(device))

    def bfloat16(self, bits: np.ndarray, device: str) -> Any:
        import torch

        # Torch has few operations on uint16; int16 carries the same bits.
        return torch.from_numpy(np.array(bits).view(np.int16)).view(torch.bfloat16).to(self.place(device))

    def numpy(self, array: Any) -> np.ndarray:
        import torch

        array = array.detach().cpu()
        if array.dtype == torch.bfloat16:
            return array.contiguous().view(torch.int16).numpy().view(np.uint16)
        return array.numpy()

    def versions(self, device: str) -> dict[str, str]:
        import torch

        name = processor_name() if device == "cpu" else torch.cuda.get_device_name()
        return {"torch": torch.__version__, "device": name}


FRAMEWORKS: dict[str, Framework] = {"jax": JaxFramework(), "torch": TorchFramework()}


class PackageCache:
    """One layer's cache of either package, with NumPy on the outside and bf16 as bits.

    `implementation` is the package's name for what quantizes and attends, its reference by default.
    `settings` are sink_tokens and recent_tokens of the configuration, and what the allocation takes.
    """

    def __init__(
        self,
        framework: Framework,
        rotation: Mapping[str, np.ndarray],
        batch: int,
        max_length: int,
        device: str = "cpu",
        query_heads: int | None = None,
        heads: int | None = None,
        dense: bool = False,
        implementation: str | None = None,
        **settings: Any,
    ):
        heads = heads or len(rotation["key_transform"])
        self.framework, self.device = framework, device
        self.implementation = implementation or framework.reference
        self.config = framework.module("core.config").CacheConfig(
            num_key_value_heads=heads,
            num_query_heads=query_heads or heads,
            head_dim=rotation["key_transform"].shape[-1],
            **{name: settings.pop(name) for name in ("sink_tokens", "recent_tokens") if name in settings},
        )
        self.module = framework.module("cache")
        with framework.device_context(device):
            self.rotation = framework.layer_rotation(rotation, device)
            allocate = self.module.allocate_dense_cache if dense else self.module.allocate_layer_cache
            self.cache = allocate(self.config, batch, max_length, **settings)

    def feed(self, feedback: Mapping[str, oracle.Feedback]) -> None:
        """Rounds the roles named sequentially from now on."""
        make, fields = self.framework.module("quantize").Feedback, {}
        for role, one in feedback.items():
            arrays = (self.framework.array(array, self.device) for array in (one.matrix, one.shift))
            fields[f"{role}_feedback"] = make(*arrays, one.steps)
        self.rotation = dataclasses.replace(self.rotation, **fields)

    def append(
        self, key: np.ndarray, value: np.ndarray, new_lengths: Any, compiled: bool = True
    ) -> "PackageCache":
        """Appends rows [B, T, K, D] (bf16 bits), of which new_lengths [B] count; returns itself."""
        with self.framework.device_context(self.device):
            run = self.module.append_rows
            run = self.framework.compiled(run, "implementation", "check") if compiled else run
            self.cache = run(
                self.cache,
                self.rotation,
                self.framework.bfloat16(key, self.device),
                self.framework.bfloat16(value, self.device),
                self.framework.array(np.asarray(new_lengths, dtype=np.int32), self.device),
                implementation=self.implementation,
            )
        return self

    def set_fields(self, **fields: np.ndarray) -> "PackageCache":
        """Replaces int32 fields such as the page tables; returns itself."""
        arrays = {name: self.framework.array(field, self.device) for name, field in fields.items()}
        self.cache = dataclasses.replace(self.cache, **arrays)
        return self

    def field(self, name: str) -> np.ndarray:
        """One array of the cache; bf16 as bits."""
        return self.framework.numpy(getattr(self.cache, name))

    def sequence(self, index: int) -> oracle.SequenceBytes:
        """What is stored for one sequence, collected through the page tables, in token order."""
        config, length = self.config, int(self.field("lengths")[index])
        pages = oracle.history_pages(length, config.sink_tokens, config.recent_tokens)
        table = self.field("page_table")[index][:pages]
        window = self.field("window_table")[index]
        end = config.sink_tokens + 64 * pages

        def raw(name: str, start: int, stop: int) -> np.ndarray:
            pool, rows = self.field(name), []  # [P', K, 64, D]
            for page in range(start // 64, -(-stop // 64)):
                recent = page - config.sink_pages
                slot = page if recent < 0 else config.sink_pages + recent % config.recent_slots
                rows.append(pool[window[slot]].transpose(1, 0, 2))
            empty = np.empty((0, config.num_key_value_heads, config.head_dim), dtype=np.uint16)
            return np.concatenate([empty, *rows])[: max(0, stop - start)]

        sink = min(length, config.sink_tokens)
        return oracle.SequenceBytes(
            **{name: self.field(name)[table] for name in PAGE_FIELDS},
            sink_key=raw("window_key", 0, sink),
            sink_value=raw("window_value", 0, sink),
            recent_key=raw("window_key", end, length),
            recent_value=raw("window_value", end, length),
        )

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Reconstructed key and value rows of one sequence, float32 [L, K, D]."""
        with self.framework.device_context(self.device):
            key, value = self.module.read_layer_cache(self.cache, self.rotation, index)
        return self.framework.numpy(key), self.framework.numpy(value)

    def _attention(self, module: str, name: str, arrays: list[Any], options: dict[str, Any]) -> Any:
        """Calls an attention function with cache and rotation after `arrays`.

        The window is an array like the rest, so that JAX compiles once for all windows.
        """
        with self.framework.device_context(self.device):
            static = [
                option for option in ("softmax_scale", "softcap", "implementation") if option in options
            ]
            run = self.framework.compiled(getattr(self.framework.module(module), name), *static)
            for option in ("sink_logits", "new_lengths", "sliding_window"):
                if options.get(option) is not None:
                    options[option] = self.framework.array(np.asarray(options[option]), self.device)
            return run(*arrays, self.cache, self.rotation, **options)

    def decode_attention(self, query: np.ndarray, *, module: str = "attention", **options: Any) -> np.ndarray:
        """`decode_attention` of `module` ("attention" or "ops"): float32 query [B, N, D] -> [B, N, D]."""
        arrays = [self.framework.array(query, self.device)]
        return self.framework.numpy(self._attention(module, "decode_attention", arrays, options))

    def _rows(self, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> list[Any]:
        return [
            self.framework.array(query, self.device),
            self.framework.bfloat16(key, self.device),
            self.framework.bfloat16(value, self.device),
        ]

    def chunk_attention(
        self,
        query: np.ndarray,
        key: np.ndarray,
        value: np.ndarray,
        *,
        module: str = "attention",
        **options: Any,
    ) -> np.ndarray:
        """`chunk_attention`: query float32 [B, T, N, D], rows as bf16 bits [B, T, K, D] -> [B, T, N, D]."""
        arrays = self._rows(query, key, value)
        return self.framework.numpy(self._attention(module, "chunk_attention", arrays, options))

    def attend(self, query: np.ndarray, key: np.ndarray, value: np.ndarray, **options: Any) -> np.ndarray:
        """`cache.attend`: attends and stores the rows; float32 [B, T, N, D]."""
        options.setdefault("implementation", self.implementation)
        out, self.cache = self._attention("cache", "attend", self._rows(query, key, value), options)
        return self.framework.numpy(out)


PAGE_FIELDS = ("key_codes", "value_codes", "key_scale", "value_scale", "key_page_mean")


def processor_name() -> str:
    """The processor's model name, for reports."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
