"""vLLM served from 2-bit pages: a plugin that registers an attention backend with vLLM 0.21.

    vllm serve MODEL --attention-backend CUSTOM --no-enable-prefix-caching --max-num-seqs 64 \
        --additional-config '{"oscar": {"rotations": "rotations.safetensors"}}'

The engine schedules, batches, samples and serves; its blocks of 64 tokens are our INT2 pages, and the BF16
sink and recent part of every running sequence lie in an arena of their own. `backend.py` alone fills in
classes of vLLM; what they do stands in the others, which any machine can run.
"""

from .plugin import register

__all__ = ["register"]
