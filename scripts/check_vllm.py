"""Checks the vLLM plugin inside vLLM 0.21: on a GPU with kernels and CUDA graphs, elsewhere the reference.

    python scripts/check_vllm.py                     # everything, about three minutes on a GPU
    python scripts/check_vllm.py --only tokens

signatures  every method that the plugin overrides has the arguments of vLLM's own class
tokens      greedy tokens of a ragged batch, prompts cut in chunks, sequences preempted and resumed, equal to
            those of our transformers path on the same weights: the steps that the engine made are replayed
            there, each sequence in an `OscarCache` of its own. A token may differ only where its logit is
            within --tie of the best.
requests    random requests with cancellations: every block and every place in the arena comes back
refusals    settings that cannot be served end in an error that names them

Without a GPU vLLM's Python is enough (its wheel unpacked on PYTHONPATH): parity_tests/vllm/real_engine.py.
Prints one line per check and exits with 1 if one failed.
"""

import argparse
import dataclasses
import functools
import inspect
import pathlib
import random
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch

from parity_tests.vllm import real_engine

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    real_engine.stand_in_for_cuda()


@dataclasses.dataclass
class Record:
    """What the engine did: for every request its tokens, and (start, count) of its steps in order."""

    steps: dict[str, list[tuple[int, int]]] = dataclasses.field(default_factory=dict)
    mixed: int = 0  # steps with chunks beside rows of one token
    preempted: int = 0


def watch(record: Record) -> None:
    """Writes every step of the engine's model runner into `record`."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # pyright: ignore[reportMissingImports]

    update_states = GPUModelRunner._update_states

    @functools.wraps(update_states)
    def watching(self: Any, scheduler_output: Any) -> Any:
        result = update_states(self, scheduler_output)
        counts = scheduler_output.num_scheduled_tokens
        for name, count in counts.items():
            start = int(self.requests[name].num_computed_tokens)
            record.steps.setdefault(name, []).append((start, count))
        record.mixed += bool(counts) and min(counts.values()) == 1 < max(counts.values())
        record.preempted += len(scheduler_output.preempted_req_ids or ())
        return result

    GPUModelRunner._update_states = watching


def make_checkpoint(folder: str, layers: int) -> Any:
    """A random Qwen3 of kernels' head_dim whose logits lie apart, in BF16; written to `folder`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=512, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, vocab_size=1000, max_position_embeddings=16_384,
        initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()  # RoPE stays in float32


def make_rotations(model: Any, path: str) -> None:
    """A rotation set of these weights, told by their fingerprint; other signs for every layer and head."""
    import numpy as np

    from oscar_torch.core.rotation_header import FINGERPRINT_FIELD, RotationHeader
    from oscar_torch.hf.fingerprint import model_fingerprint
    from oscar_torch.rotations.bases import BASIS_VERSION, hadamard_matrix
    from oscar_torch.rotations.rotation import RotationSet, make_layer_rotation
    from oscar_torch.rotations.store import save_safetensors

    config, generator, layers = model.config, np.random.default_rng(0), {}
    heads, head_dim = config.num_key_value_heads, config.head_dim
    for layer in range(config.num_hidden_layers):
        signs = np.where(generator.random((2, heads, head_dim)) < 0.5, -1.0, 1.0)
        key, value = ([s[:, None] * hadamard_matrix(head_dim) for s in role] for role in signs)
        layers[layer] = make_layer_rotation(key, value)
    header = RotationHeader(
        model_id="test/random-qwen3", layers=tuple(layers), num_query_heads=config.num_attention_heads,
        num_key_value_heads=heads, head_dim=head_dim, rope="half", basis="hadamard",
        basis_version=BASIS_VERSION, extra={FINGERPRINT_FIELD: model_fingerprint(model)},
    )  # fmt: skip
    save_safetensors(RotationSet(header, layers), path)


class Check:
    """The checks and what they share: a checkpoint, its rotations, and the engine, made once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = tempfile.mkdtemp(prefix="check_vllm_")
        self.model = make_checkpoint(self.folder, options.layers)
        self.rotations = f"{self.folder}.rotations.safetensors"
        make_rotations(self.model, self.rotations)
        self.record = Record()
        self._engine: Any = None

    @property
    def engine(self) -> Any:
        if self._engine is None:
            from oscar_torch.core.cache_format import int2_page_bytes

            block = 2 * int2_page_bytes(128) * self.options.layers
            bytes_ = self.options.blocks * block
            self._engine = real_engine.make_engine(
                self.folder, {"rotations": self.rotations, "implementation": self.options.implementation},
                max_model_len=8192 if ON_GPU else 2048, max_num_seqs=self.options.sequences,
                max_num_batched_tokens=self.options.budget, kv_cache_memory_bytes=bytes_,
            )  # fmt: skip
            watch(self.record)
        return self._engine

    def state(self) -> Any:
        """The plugin's state in the engine of this process."""
        from oscar_torch.vllm.backend import find_state

        return find_state(self.engine.vllm_config.compilation_config.static_forward_context)

    def free_blocks(self) -> int:
        return self.engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(self, name: str, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return self.engine.add_request(name, {"prompt_token_ids": prompt}, params) or name

    def signatures(self) -> str:
        """Compares overridden methods with the classes they come from."""
        from oscar_torch.vllm import backend

        compared = 0
        for ours in (backend.OscarAttentionBackend, backend.OscarMetadataBuilder, backend.OscarAttentionImpl):
            base = ours.__mro__[1]
            missing = getattr(ours, "__abstractmethods__", ())
            assert not missing, f"{ours.__name__} does not fill in {sorted(missing)}"
            for name in vars(ours):
                theirs = getattr(base, name, None)
                if (name.startswith("_") and name != "__init__") or not callable(theirs):
                    continue
                names = [
                    [p.name for p in inspect.signature(f).parameters.values() if p.kind != p.VAR_KEYWORD]
                    for f in (getattr(ours, name), theirs)
                ]
                assert names[0] == names[1], f"{ours.__name__}.{name}: {names[0]}, vLLM: {names[1]}"
                compared += 1
        return f"{compared} methods"

    def refusals(self) -> str:
        """Engines that must not start."""
        cases: dict[str, dict[str, Any]] = {
            "enable_prefix_caching": {"enable_prefix_caching": True},
            "fp8": {"kv_cache_dtype": "fp8"},
            "block_size": {"block_size": 32},
            "rotations": {"additional_config": {"oscar": {}}},
            "no section": {"additional_config": {}},
            "float16": {"dtype": "float16"},
        }
        words = {"fp8": "kv_cache_dtype", "no section": "oscar", "float16": "dtype"}
        for case, options in cases.items():
            oscar = {"rotations": self.rotations}
            memory = {"kv_cache_memory_bytes": 1 << 24, "max_model_len": 1024, "max_num_seqs": 2}
            try:
                real_engine.make_engine(self.folder, oscar, **(memory | options))
            except Exception as error:  # the engine wraps some
                text = f"{error} {error.__cause__}"
                assert words.get(case, case) in text, f"{case}: {text[:300]}"
            else:
                raise AssertionError(f"an engine with {options} started")
        return f"{len(cases)} settings"

    def tokens(self) -> str:
        """Tokens of a ragged batch against our transformers path."""
        generator = random.Random(1)
        lengths = [1300, 64, 129, 384, 385, 5, 700, 1023]  # the first six fill the engine's blocks
        if ON_GPU:
            lengths = [6000, 64, 129, 385, 1023, 3000, 5, 7000]
        prompts = [[generator.randrange(3, 1000) for _ in range(n)] for n in lengths]
        made = [self.options.tokens + 7 * i for i in range(len(lengths))]
        names = [self.add(f"t{i}", *pair) for i, pair in enumerate(zip(prompts, made))]
        outputs: dict[str, list[int]] = {}
        since = time.time()
        while self.engine.has_unfinished_requests():
            for out in self.engine.step():
                if out.finished:
                    outputs[out.request_id] = list(out.outputs[0].token_ids)
        seconds = time.time() - since
        assert self.record.mixed and self.record.preempted, (
            f"not covered: {self.record.mixed=} {self.record.preempted=}"
        )
        device = "cuda" if ON_GPU else "cpu"
        model = self.model.to(device)
        model.set_attn_implementation("oscar")
        equal = ties = 0
        for name, prompt in zip(names, prompts):
            out = outputs[name] if name in outputs else outputs[name.rsplit("-", 1)[0]]
            steps = next(v for k, v in self.record.steps.items() if k == name or k.startswith(f"{name}-"))
            same, tied = self.replay(model, prompt + out, len(prompt), steps)
            equal, ties = equal + same, ties + tied
        assert equal >= 0.9 * (equal + ties), f"{ties} of {equal + ties} tokens differ"
        return (
            f"{equal} equal, {ties} within {self.options.tie} of the best logit; "
            f"{self.record.mixed} mixed steps, {self.record.preempted} preemptions, {seconds:.1f} s"
        )

    @torch.inference_mode()
    def replay(
        self, model: Any, tokens: list[int], prompt: int, steps: list[tuple[int, int]]
    ) -> tuple[int, int]:
        """Makes the engine's steps of one sequence with an OscarCache: tokens that are equal, near ties."""
        from oscar_torch.hf import OscarCache

        equal = ties = 0
        reached, cache = prompt, None
        for start, count in steps:
            if start == 0:  # new, or again from the first token after a preemption
                cache = OscarCache(
                    self.rotations, model.config, prefill_chunk=1 << 20, model_id="random-qwen3",
                    implementation=self.options.implementation,
                )  # fmt: skip
            ids = torch.tensor([tokens[start : start + count]], device=model.device)
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits[0, -1].float()
            if start + count < reached or start + count >= len(tokens):
                continue  # nothing new was sampled
            reached = start + count + 1
            chosen = tokens[start + count]
            behind = float(logits.max() - logits[chosen])
            assert behind <= self.options.tie, (
                f"token {start + count} of {len(tokens)}: {behind:.3f} behind the best"
            )
            equal += int(logits.argmax()) == chosen
            ties += int(logits.argmax()) != chosen
        assert reached == len(tokens), f"{reached} of {len(tokens)} tokens were replayed"
        return equal, ties

    def requests(self) -> str:
        """Random requests, some cancelled; nothing may be left over."""
        engine, generator = self.engine, random.Random(2)
        before = self.free_blocks()
        left, alive, cancelled, steps = self.options.requests, [], 0, 0
        while left or engine.has_unfinished_requests():
            for _ in range(min(left, generator.randrange(4))):
                prompt = [generator.randrange(3, 1000) for _ in range(generator.choice([1, 30, 200, 500]))]
                alive.append(self.add(f"r{left}", prompt, generator.randrange(1, 12)))
                left -= 1
            if alive and generator.random() < 0.2:
                engine.abort_request([alive.pop(generator.randrange(len(alive)))])
                cancelled += 1
            finished = {out.request_id for out in engine.step() if out.finished}
            alive = [name for name in alive if name not in finished]
            steps += 1
        engine.engine_core.engine_core.step_fn()  # hands on what ended last
        held = self.state().slots.used
        assert self.free_blocks() == before, f"{before - self.free_blocks()} blocks are lost"
        assert held <= self.options.sequences, f"{held} places are held"
        self.add("last", [3] * 70, 2)  # a further step tells the runner of everything that ended
        while engine.has_unfinished_requests():
            engine.step()
        assert self.state().slots.used <= 1, f"{self.state().slots.used} places are held"
        assert self.free_blocks() == before
        return f"{self.options.requests} requests, {cancelled} cancelled, {steps} steps"


def main() -> int:
    names = ("signatures", "tokens", "requests", "refusals")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=names, action="append", help="this check alone; may be repeated")
    parser.add_argument("--layers", type=int, default=2, help="of the random model")
    parser.add_argument("--sequences", type=int, default=8, help="max_num_seqs")
    parser.add_argument("--budget", type=int, default=2048 if ON_GPU else 300, help="max_num_batched_tokens")
    parser.add_argument(
        "--blocks", type=int, default=172 if ON_GPU else 40, help="of the engine: few, to preempt"
    )
    parser.add_argument("--tokens", type=int, default=90 if ON_GPU else 12, help="to generate, at least")
    parser.add_argument("--requests", type=int, default=1000 if ON_GPU else 60, help="random ones")
    parser.add_argument("--tie", type=float, default=0.3, help="difference of logits that counts as a tie")
    parser.add_argument("--implementation", help="of the kernels, default: the fastest that runs")
    options = parser.parse_args()
    began, failed = time.time(), 0
    check = Check(options)
    for name in options.only or names:
        since = time.time()
        try:
            line = getattr(check, name)()
        except Exception as error:
            failed += 1
            line = f"FAILED: {type(error).__name__}: {error}"
            if not isinstance(error, AssertionError):
                import traceback

                traceback.print_exc()
        print(f"{name:11}{line}  [{time.time() - since:.1f} s]", flush=True)
    place = "a GPU" if ON_GPU else "the CPU"
    print(f"{'FAILED' if failed else 'passed'} on {place}, {time.time() - began:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
