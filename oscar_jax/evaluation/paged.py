"""Answers and texts through the real paged 2-bit cache and the kernels of this device, as `Generator` serves.

A prompt is read in chunks that attend exactly to themselves, as in serving. The questions about a text share
its pages: each sequence has window pages of its own and room for the pages that its own tokens fill.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..core import cache_format as fmt
from ..core.errors import ConfigError
from ..generate import Generator
from ..layer_cache import DenseCache
from ..models.cached_attention import AnyCache
from ..models.decoder import Attention
from ..models.linear_attention import RecurrentState
from ..models.protocol import LanguageModel
from ..rotations.rotation import RotationSet
from .subject import Subject, window_policy

PAGED = "int2:cache"  # its name as a method


class _Endless(nnx.Module):
    """A model that never chooses an end token."""

    def __init__(self, model: LanguageModel, ends: Sequence[int]) -> None:
        self.model, self.ends, self.dtype = model, tuple(ends), model.dtype

    def hidden_states(
        self,
        tokens: jax.Array,
        states: Sequence[Any] | None = None,
        *,
        positions: jax.Array,
        attention: Attention,
        **padding: jax.Array,
    ) -> tuple[jax.Array, list[Any]]:
        """See `LanguageModel`."""
        return self.model.hidden_states(tokens, states, positions=positions, attention=attention, **padding)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """See `LanguageModel`."""
        return self.model.logits(hidden).at[..., jnp.asarray(self.ends, jnp.int32)].set(-jnp.inf)


class Paged:
    """A subject with its 2-bit cache. Raises ConfigError without rotations, and on a mesh."""

    def __init__(self, subject: Subject, rotations: RotationSet | None, *, all_layers: bool = False) -> None:
        if rotations is None:
            raise ConfigError(f"method {PAGED!r} needs --rotations")
        if subject.mesh is not None:
            raise ConfigError(f"method {PAGED!r} runs on one device, without --mesh")
        options: dict[str, Any] = {
            "rotations": rotations,
            "window_policy": window_policy(all_layers),
            "model_id": subject.config.model_id if subject.config.fingerprint is None else None,
        }
        config = subject.config
        self._answering = Generator(subject.model, config, **options)
        endless = _Endless(subject.model, config.eos_token_ids)
        self._writing = Generator(endless, config, eos_token_ids=(), **options)

    def answer(
        self, text: np.ndarray, questions: Sequence[Sequence[int]], new_tokens: int, *, capacity: int
    ) -> list[list[int]]:
        """Up to `new_tokens` greedy tokens after each question, which all follow the same text int32 [S].

        `capacity` is at least S, the longest question and the new tokens; equal ones share programs.
        """
        room = max(map(len, questions)) + new_tokens
        read = self._answering([text.tolist()], 1, capacity=capacity)
        shared = share_pages(read.caches, len(questions), room)
        return self._answering(questions, new_tokens, caches=shared).tokens

    def write(self, prompt: np.ndarray, new_tokens: int, *, capacity: int) -> np.ndarray:
        """`new_tokens` greedy tokens after a prompt int32 [S]; end tokens are never chosen."""
        return np.asarray(self._writing([prompt.tolist()], new_tokens, capacity=capacity).tokens[0], np.int32)


@functools.partial(jax.jit, static_argnames=("count", "tokens"))
def share_pages(caches: Sequence[AnyCache], count: int, tokens: int) -> list[AnyCache]:
    """Caches of `count` sequences that all begin with what caches of one sequence hold.

    INT2 pages are shared, where no window takes them again in turn; each sequence has room for `tokens` more,
    as far as the tables reach. The caches given stay as they are.
    """

    def repeated(leaf: jax.Array) -> jax.Array:
        return jnp.repeat(leaf, count, axis=0)

    def shared(cache: AnyCache) -> AnyCache:
        if isinstance(cache, DenseCache | RecurrentState):
            return jax.tree.map(repeated, cache)
        sequence = jnp.arange(count, dtype=jnp.int32)[:, None]
        table = repeated(cache.page_table)
        pages = cache.key_codes.shape[0]
        own = -(-tokens // fmt.PAGE_TOKENS) + 1 if cache.config.window is None else pages - 1
        if cache.config.window is None:
            after = jnp.arange(table.shape[1], dtype=jnp.int32) - cache.history_pages[0]
            table = jnp.where(after < 0, table, jnp.where(after < own, pages + own * sequence + after, 0))
        else:
            table = table + own * sequence
        changed = {"page_table": table}
        for name in fmt.INT2_ARRAYS:
            array = getattr(cache, name)
            new = (
                jnp.zeros((own * count, *array.shape[1:]), array.dtype)
                if cache.config.window is None
                else jnp.tile(array[1:], (count - 1, *[1] * (array.ndim - 1)))
            )
            changed[name] = jnp.concatenate([array, new])
        slots = cache.window_table.shape[1]
        changed["window_table"] = 1 + slots * sequence + jnp.arange(slots, dtype=jnp.int32)
        for name in fmt.WINDOW_ARRAYS:
            array = getattr(cache, name)
            copies = jnp.tile(array[cache.window_table[0]], (count, *[1] * (array.ndim - 1)))
            changed[name] = jnp.concatenate([array[:1], copies])
        changed |= {name: repeated(getattr(cache, name)) for name in ("lengths", "history_pages")}
        return dataclasses.replace(cache, **changed)

    return [shared(cache) for cache in caches]
