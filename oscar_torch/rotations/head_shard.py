"""The heads of one rank where a model's attention is split over ranks, and what a cache of them takes.

A key/value head meets no other head in a cache: its rows are rotated, coded and attended to by themselves. So
a rank's cache holds the bytes that one process would hold for the same heads, and nothing is sent between
ranks for it.
"""

import dataclasses
from typing import Any

from ..core import cache_format as fmt
from ..core.config import CacheConfig
from ..core.errors import ConfigError, ShapeError
from ..quantize import Feedback
from .rotation import FEEDBACKS, LayerRotation


@dataclasses.dataclass(frozen=True)
class HeadShard:
    """The heads with which `rank` of `ranks` attends; query heads are split evenly, in order.

    Key/value heads are split alike, or `replicated`: every rank computes all of them, as models with fewer
    heads than ranks must, and stores those that its query heads attend to. Raises ConfigError for heads that
    cannot be split so.
    """

    rank: int
    ranks: int
    num_query_heads: int  # of the whole model
    num_key_value_heads: int
    replicated: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(f"rank = {self.rank} of {self.ranks}, allowed: 0 <= rank < ranks")
        if self.num_query_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_query_heads = {self.num_query_heads} is not a multiple of "
                f"num_key_value_heads = {self.num_key_value_heads}"
            )
        if self.num_query_heads % self.ranks:
            raise ConfigError(f"num_query_heads = {self.num_query_heads} over {self.ranks} ranks: not even")
        if not self.replicated and self.num_key_value_heads % self.ranks:
            raise ConfigError(
                f"num_key_value_heads = {self.num_key_value_heads} over {self.ranks} ranks, allowed: a "
                "multiple of the ranks, or key and value projections that every rank has whole (replicated)"
            )
        group = self.num_query_heads // self.num_key_value_heads
        wanted = [head // group - self.heads.start for head in self.query_heads]
        each, rest = divmod(len(wanted), len(self.heads))
        if rest or wanted != [i // each for i in range(len(wanted))]:
            raise ConfigError(
                f"query heads {self.query_heads.start}..{self.query_heads.stop - 1} of rank {self.rank} "
                f"share key/value heads {self.heads.start}..{self.heads.stop - 1} unevenly, {group} to each "
                "in the model; allowed: ranks with whole groups, or within one"
            )

    @property
    def query_heads(self) -> range:
        """The rank's query heads, by their numbers in the model."""
        count = self.num_query_heads // self.ranks
        return range(self.rank * count, (self.rank + 1) * count)

    @property
    def heads(self) -> range:
        """The key/value heads that they attend to, by their numbers in the model."""
        group = self.num_query_heads // self.num_key_value_heads
        return range(self.query_heads[0] // group, self.query_heads[-1] // group + 1)

    def config(self, config: CacheConfig) -> CacheConfig:
        """The geometry of the rank's cache, from that of the whole model; ShapeError for another model's."""
        self._require_heads(config.num_key_value_heads)
        return dataclasses.replace(
            config, num_query_heads=len(self.query_heads), num_key_value_heads=len(self.heads)
        )

    def rotation(self, rotation: LayerRotation) -> LayerRotation:
        """The rotation of the rank's heads; one that all heads share stays as it is."""
        if rotation.key_transform.shape[0] == 1:
            return rotation
        self._require_heads(rotation.key_transform.shape[0])
        own = slice(self.heads.start, self.heads.stop)
        arrays: dict[str, Any] = {name: getattr(rotation, name)[own] for name in fmt.ROTATION_FIELDS}
        for name in FEEDBACKS:
            if (feedback := getattr(rotation, name)) is not None:
                arrays[name] = Feedback(feedback.matrix[own], feedback.shift[own], feedback.steps)
        return LayerRotation(**arrays)

    def model_id(self, model_id: str) -> str:
        """A name for the rank's part of a model: a pool of that name refuses the snapshots of other ranks."""
        return f"{model_id}, heads {self.heads.start}..{self.heads.stop - 1} of {self.num_key_value_heads}"

    def _require_heads(self, heads: int) -> None:
        if heads != self.num_key_value_heads:
            raise ShapeError(f"{heads} key/value heads, this is a shard of {self.num_key_value_heads}")
