"""Tokenizers through `transformers`: a checkpoint's own, or one rebuilt from GGUF metadata.

For GGUF files of Gemma the vocabulary is handed to `transformers`' Gemma tokenizer here: releases before 5.24
rank its merges by the file's scores, which do not follow the order in which Gemma merges, and so cut words
into far too many pieces that still decode to the right text. Byte-level vocabularies of GGUF files are cut by
the rule that `tokenizer.ggml.pre` names, not by what another model of the same architecture does.
"""

from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError
from .gguf_file import GGUFFile

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_SPACE = "▁"  # how sentencepiece writes a space

# Where words are cut before pieces are merged; llama.cpp's names of the rules that this project knows.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GROUPS_OF_THREE = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_SINGLE_DIGITS = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_MARKS_IN_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_CASE = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2, _DIGITS_THEN_GPT2 = "gpt2", "digits, then gpt2"
_PRE_TOKENIZERS = {
    "llama-bpe": _GROUPS_OF_THREE,
    "llama3": _GROUPS_OF_THREE,
    "glm4": _GROUPS_OF_THREE,
    "chatglm-bpe": _GROUPS_OF_THREE,
    "dbrx": _GROUPS_OF_THREE,  # Phi 4, OLMo 2
    "gpt-4o": _BY_CASE,  # gpt-oss, Phi 4 mini
    "qwen2": _SINGLE_DIGITS,
    "qwen35": _MARKS_IN_WORDS,
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "command-r": _DIGITS_THEN_GPT2,
}
_BOS_BY_DEFAULT = ("llama-bpe", "llama3")  # llama.cpp adds it for these if the file does not say
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3")  # a word that is a piece is not merged from parts


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
        if metadata.get("tokenizer.ggml.model") == "gpt2":
            return byte_level_tokenizer(metadata)
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # transformers raises whatever its parsers raise
        reason = str(error).strip().splitlines()
        raise CheckpointError(f"no tokenizer in {path}: {reason[0] if reason else repr(error)}") from None


def leading_bos(tokenizer: Any) -> int | None:
    """The one id that a tokenizer puts before every text, None if it puts none.

    The tokenizer decides, not the configuration: Qwen's names a beginning-of-text id that is never used.
    Raises CheckpointError if it puts more than one.
    """
    plain, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            if start > 1:
                raise CheckpointError(f"the tokenizer puts {whole[:start]} before a text, allowed: one id")
            return whole[0] if start else None
    raise CheckpointError(f"the tokenizer cuts 'a' into {plain} alone, but into {whole} with special tokens")


def byte_level_tokenizer(metadata: dict[str, Any]) -> Any:
    """Byte-level BPE of GGUF metadata, cut by the rule `tokenizer.ggml.pre`; CheckpointError for others."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import AddedToken, PreTrainedTokenizerFast

    name = metadata.get("tokenizer.ggml.pre")
    if name not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"tokenizer.ggml.pre = {name!r} is not supported, allowed: {', '.join(_PRE_TOKENIZERS)}"
        )
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=name in _WHOLE_WORDS_FIRST))
    rule = _PRE_TOKENIZERS[name]
    if rule == _GPT2:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    elif rule == _DIGITS_THEN_GPT2:
        steps = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    else:
        steps = [
            pre_tokenizers.Split(Regex(rule), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    ids = {
        kind: metadata.get(f"tokenizer.ggml.{key}_token_id")
        for kind, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    special = {f"{kind}_token": tokens[index] for kind, index in ids.items() if index is not None}
    adds = metadata.get("tokenizer.ggml.add_bos_token", name in _BOS_BY_DEFAULT)
    if adds and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, ids["bos"])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=metadata.get("tokenizer.chat_template"), **special
    )
    for kind, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        whole = [
            AddedToken(token, normalized=False, special=is_special)
            for token, found in zip(tokens, kinds)
            if found == kind
        ]
        tokenizer.add_tokens(whole, special_tokens=is_special)
    return tokenizer


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
        chat_template=metadata.get("tokenizer.chat_template"),
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
