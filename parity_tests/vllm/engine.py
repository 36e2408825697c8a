"""A small engine: block allocator, continuous batching, chunked prefill, preemption and aborts, in integers.

It hands a batch over as vLLM does: query_start_loc, lengths after the step, a block table, and the ids of
requests that ended or were preempted. Rows of one token come first, as vLLM orders them for a backend with
reorder_batch_threshold = 1.
"""

import dataclasses
import random
from collections.abc import Iterator

BLOCK = 64


@dataclasses.dataclass
class Request:
    name: str
    prompt: int  # tokens
    total: int  # prompt and generated
    computed: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    times: int = 0  # started, once more after every preemption

    def known(self, reached: int) -> int:
        """Tokens that can be computed without a new sample: all of them again after a preemption."""
        return max(self.prompt, reached)


@dataclasses.dataclass
class Batch:
    """One step: rows in order, and what left before it."""

    requests: list[Request]
    counts: list[int]
    left: list[str]  # ended, aborted or preempted since the last step
    ended: list[str]


class Engine:
    def __init__(self, blocks: int, sequences: int, budget: int, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.free = list(range(1, blocks + 1))  # block 0 is the null block
        self.random.shuffle(self.free)
        self.blocks, self.sequences, self.budget = blocks, sequences, budget
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.reached: dict[str, int] = {}  # most tokens that a request has had
        self.left: list[str] = []
        self.ended: list[str] = []
        self.preemptions = 0

    def add(self, name: str, prompt: int, total: int) -> None:
        self.waiting.append(Request(name, prompt, total))

    def abort(self, name: str) -> None:
        for queue in (self.running, self.waiting):
            for request in [r for r in queue if r.name == name]:
                queue.remove(request)
                self._release(request)
                self.ended.append(name)

    def _release(self, request: Request) -> None:
        self.free += request.blocks
        self.random.shuffle(self.free)
        request.blocks = []
        self.left.append(request.name)

    def _need(self, request: Request, count: int) -> int:
        return -(-(request.computed + count) // BLOCK) - len(request.blocks)

    def step(self) -> Batch | None:
        """Schedules, as vLLM's scheduler does: running requests first, then waiting ones."""
        scheduled: dict[str, tuple[Request, int]] = {}
        budget = self.budget
        preempted = False
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted by one before it
            missing = request.known(self.reached.get(request.name, 0)) - request.computed
            count = min(max(1, missing), budget)
            if not count:
                continue
            while self._need(request, count) > len(self.free):
                victim = self.running.pop()
                preempted = True
                self.preemptions += 1
                self._release(victim)
                victim.computed = 0
                _, returned = scheduled.pop(victim.name, (victim, 0))
                budget += returned
                self.waiting.insert(0, victim)
                if victim is request:
                    break
            if request not in self.running:
                continue
            self._grow(request, count)
            scheduled[request.name] = request, count
            budget -= count
        while not preempted and self.waiting and budget and len(self.running) < self.sequences:
            request = self.waiting[0]
            count = min(request.known(self.reached.get(request.name, 0)), budget)
            if self._need(request, count) > len(self.free):
                break
            self.waiting.pop(0)
            request.times += 1
            self.running.append(request)
            self._grow(request, count)
            scheduled[request.name] = request, count
            budget -= count
        left, self.left = self.left, []
        ended, self.ended = self.ended, []
        if not scheduled and not left:
            return None
        rows = sorted(scheduled.values(), key=lambda row: (row[0].computed == 0, row[1] > 1))
        return Batch([r for r, _ in rows], [n for _, n in rows], left, ended)

    def _grow(self, request: Request, count: int) -> None:
        for _ in range(max(0, self._need(request, count))):
            request.blocks.append(self.free.pop())

    def finish(self, batch: Batch) -> None:
        """Counts the tokens of a step; requests that are complete end."""
        for request, count in zip(batch.requests, batch.counts):
            request.computed += count
            self.reached[request.name] = max(self.reached.get(request.name, 0), request.computed)
            if request.computed >= request.total:
                self.running.remove(request)
                self._release(request)
                self.ended.append(request.name)

    def run(self) -> Iterator[Batch]:
        """Steps until nothing is left to do."""
        while self.running or self.waiting or self.left:
            batch = self.step()
            assert batch is not None, "the engine has requests and schedules none"
            yield batch
            self.finish(batch)
