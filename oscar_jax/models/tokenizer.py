"""Tokenizers through `transformers`: a checkpoint's own, or one rebuilt from GGUF metadata.

For GGUF files of Gemma the vocabulary is handed to `transformers`' Gemma tokenizer here: releases before 5.24
rank its merges by the file's scores, which do not follow the order in which Gemma merges, and so cut words
into far too many pieces that still decode to the right text.
"""

from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError
from .gguf_file import GGUFFile

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_SPACE = "▁"  # how sentencepiece writes a space


def load_tokenizer(path: Path) -> Any:
    """The `transformers` tokenizer of a checkpoint directory or a .gguf file; raises CheckpointError."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise CheckpointError("tokenizers need the package transformers: pip install transformers") from None
    if path.is_dir() and not any((path / name).exists() for name in _FILES):
        # transformers would quietly make an empty one
        raise CheckpointError(f"no tokenizer in {path}: none of {', '.join(_FILES)}")
    try:
        if path.is_dir():
            return AutoTokenizer.from_pretrained(path, local_files_only=True)
        metadata = GGUFFile(path).metadata
        if metadata.get("tokenizer.ggml.model") == "llama" and metadata["general.architecture"] == "gemma3":
            return gemma_tokenizer(metadata)
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = str(error).strip().splitlines()
        raise CheckpointError(f"no tokenizer in {path}: {reason[0] if reason else repr(error)}") from None


def gemma_tokenizer(metadata: dict[str, Any]) -> Any:
    """Gemma's byte-fallback BPE from GGUF metadata: the vocabulary in merge order, without the merges."""
    from transformers import AddedToken
    from transformers.models.gemma.tokenization_gemma import GemmaTokenizer

    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    # Runs of spaces are stored as spaces, but looked up as sentencepiece spells them.
    pieces = [token.replace(" ", _SPACE) if not token.strip(" ") else token for token in tokens]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    special = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    tokenizer = GemmaTokenizer(
        vocab=vocabulary,
        merges=merges_in_order(vocabulary),  # pyright: ignore[reportArgumentType] (pairs are taken too)
        add_bos_token=metadata.get("tokenizer.ggml.add_bos_token", True),
        add_eos_token=metadata.get("tokenizer.ggml.add_eos_token", False),
        **special,
    )
    control = [
        AddedToken(token, normalized=False, special=True)
        for token, kind in zip(tokens, kinds)
        if kind == _CONTROL
    ]
    tokenizer.add_tokens(control, special_tokens=True)
    whole = [
        AddedToken(token, normalized=False, special=False)
        for token, kind in zip(tokens, kinds)
        if kind == _USER_DEFINED and token in vocabulary
    ]
    tokenizer.add_tokens(whole)
    return tokenizer


def merges_in_order(vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs of pieces that join to a piece: earlier pieces first, of one piece the longest left part."""
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(vocabulary, key=vocabulary.__getitem__)
        for cut in range(len(piece) - 1, 0, -1)
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
