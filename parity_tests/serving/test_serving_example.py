"""The server of docs/serving.md, run as it stands on a tiny model: the scheduler may not change a token."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from parity_tests.hf import tiny  # noqa: E402

pytestmark = pytest.mark.hf
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's last Python example defines."""
    names: dict[str, Any] = {}
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(examples[-1], str(PAGE), "exec"), names)
    return names


def serve(
    page: dict[str, Any],
    family: str,
    prompts: list[list[int]],
    folder: Path,
    new_tokens: int = NEW_TOKENS,
    **options: Any,
) -> Any:
    """Serves the prompts together; the requests, how often one was preempted, the pool's counts."""
    model = tiny.make_model(family, "sdpa")
    rotations = tiny.make_rotations(model.config)
    pool = page["make_pool"](model, rotations, max_length=700, grid_tokens=128, **options)
    server = page["Server"](model, pool, folder)
    requests = [page["Request"](list(prompt), len(prompt) + new_tokens) for prompt in prompts]
    server.waiting = list(requests)
    preemptions = 0
    for _ in range(200):  # a request is a few chunks and tokens: many more steps would be a livelock
        if not server.waiting and not server.running:
            break
        before = len(server.waiting)
        server.step()
        preemptions += len(server.waiting) > before
        pool.pages.check()
    assert not server.waiting and not server.running
    assert pool.statistics().live_bytes == 0
    return requests, preemptions, pool.statistics()


def prompts() -> list[list[int]]:
    """Two prompts that begin alike for three pages, two others, one shorter than the windows."""
    rng = np.random.default_rng(3)
    stem = rng.integers(2, 97, 290).tolist()
    return [
        [*stem, *rng.integers(2, 97, 200).tolist()],
        [*stem, *rng.integers(2, 97, 170).tolist()],
        rng.integers(2, 97, 450).tolist(),
        rng.integers(2, 97, 40).tolist(),
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_requests_get_the_tokens_they_would_get_alone(
    page: dict[str, Any], family: str, tmp_path: Path
) -> None:
    """Shared prefixes and batches: the tokens of lonely runs."""
    alone = [serve(page, family, [prompt], tmp_path)[0][0].tokens for prompt in prompts()]
    together, none, shared = serve(page, family, prompts(), tmp_path)
    assert [request.tokens for request in together] == alone
    assert none == 0 and shared.reused_tokens == 256


def test_preempted_requests_get_the_tokens_they_would_get_alone(page: dict[str, Any], tmp_path: Path) -> None:
    """Three requests that fit when they come and not when they have grown: one waits in a file meanwhile."""
    short = [prompt[:120] for prompt in prompts()[1:3]] + [prompts()[0][300:420]]
    alone = [serve(page, "llama", [prompt], tmp_path, 16)[0][0].tokens for prompt in short]
    requests, preemptions, _ = serve(page, "llama", short, tmp_path, 16, window_pages=7)
    assert preemptions > 0
    assert [request.tokens for request in requests] == alone


def test_a_failing_model_leaves_the_pool_as_it_was(page: dict[str, Any], tmp_path: Path) -> None:
    """An exception in the second layer: the server raises it, and goes on when it is called again."""
    model = tiny.make_model("llama", "sdpa")
    pool = page["make_pool"](model, tiny.make_rotations(model.config), max_length=700)
    server = page["Server"](model, pool, tmp_path)
    prompt = prompts()[3]
    request = page["Request"](list(prompt), len(prompt) + NEW_TOKENS)
    server.waiting = [request]
    layer = model.model.layers[1].self_attn
    right = layer.forward

    def failing(*arguments: Any, **named: Any) -> Any:
        layer.forward = right
        raise KeyboardInterrupt

    layer.forward = failing
    with pytest.raises(KeyboardInterrupt):
        server.step()
    while server.waiting or server.running:
        server.step()
    assert request.tokens == serve(page, "llama", [prompt], tmp_path)[0][0].tokens
