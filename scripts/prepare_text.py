"""Turn a text into Megatron's indexed dataset and a tokenizer, and print their common prefix.

    python scripts/prepare_text.py [--text FILE] [--cache DIR] [--vocab-size N]

PREFIX.bin and PREFIX.idx are the dataset, PREFIX.model is a SentencePiece tokenizer (BPE with
bytes for unknown characters) trained on the same text. The default text is the documentation
that ships with Python, about half a million characters of English. A text that was
prepared before is not prepared again.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_MIN_DOCUMENTS = 40  # so that none of the three splits is empty
_MIN_DOCUMENT_CHARS = 200
_MAX_DOCUMENT_CHARS = 4000
_SUFFIXES = (".model", ".bin", ".idx")  # in the order of writing
_FORMAT = "1"  # increase it if the same text gives other files


class TextError(Exception):
    """The text cannot become a dataset; the message has the reason and the fix."""


def read_text(path: Path | None) -> str:
    """Return the text of `path`, or Python's documentation; raises TextError."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}): "
            "convert it, for example with iconv -t UTF-8"
        ) from error
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from error
    if not text.strip():
        raise TextError(f"{path} is empty: give a file with some pages of text")
    return text


def split_documents(text: str) -> list[str]:
    """Split `text` at empty lines into documents of up to a few thousand characters.

    Megatron splits training from validation by document, so one long text must be several.
    Raises TextError when there are too few for that.
    """
    max_chars = min(max(len(text) // 100, _MIN_DOCUMENT_CHARS), _MAX_DOCUMENT_CHARS)
    documents: list[str] = []
    current: list[str] = []
    for paragraph in _paragraphs(text, max_chars):
        if current and sum(map(len, current)) + len(paragraph) > max_chars:
            documents.append("\n\n".join(current))
            current = []
        current.append(paragraph)
    documents.append("\n\n".join(current))
    if len(documents) < _MIN_DOCUMENTS:
        raise TextError(
            f"the text is too short: {len(text):,} characters, where training, validation and test "
            f"need about {_MIN_DOCUMENTS * _MIN_DOCUMENT_CHARS:,}"
        )
    return documents


def _paragraphs(text: str, max_chars: int) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        if paragraph.strip():
            yield from (
                paragraph[offset : offset + max_chars]
                for offset in range(0, len(paragraph), max_chars)
            )


def train_tokenizer(documents: list[str], vocab_size: int) -> bytes:
    """Return a SentencePiece BPE model of at most `vocab_size` pieces that loses no character.

    A short text gives fewer pieces; then the vocabulary is as large as possible.
    """
    import sentencepiece

    model = io.BytesIO()
    lines = [line for document in documents for line in document.split("\n") if line]
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            minloglevel=2,
        )
    except RuntimeError as error:
        match = re.search(r"Please set it to a value <= (\d+)", str(error))
        if match is None or int(match[1]) >= vocab_size:
            raise TextError(f"SentencePiece cannot learn a vocabulary: {error}") from error
        return train_tokenizer(documents, int(match[1]))
    return model.getvalue()


def write_dataset(documents: list[str], prefix: Path, vocab_size: int) -> int:
    """Write the tokenizer and the dataset at `prefix` and return the number of tokens."""
    import sentencepiece
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    model = train_tokenizer(documents, vocab_size)
    _path(prefix, ".model").write_bytes(model)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model)
    builder = IndexedDatasetBuilder(
        str(_path(prefix, ".bin")), dtype=DType.optimal_dtype(tokenizer.get_piece_size())
    )
    num_tokens = 0
    for document in documents:
        tokens = [*tokenizer.encode(document), tokenizer.eos_id()]
        builder.add_document(torch.tensor(tokens), [len(tokens)])
        num_tokens += len(tokens)
    builder.finalize(str(_path(prefix, ".idx")))
    return num_tokens


def prepare(text_path: Path | None, cache: Path, vocab_size: int) -> Path:
    """Return the prefix of a text's dataset, from the cache if present; raises TextError."""
    text = read_text(text_path)
    key = hashlib.sha256("\0".join([_FORMAT, str(vocab_size), text]).encode()).hexdigest()[:16]
    prefix = cache / key / "text"
    if _path(prefix, ".done").exists():
        return prefix
    source = text_path or "Python's documentation"
    _print_status(f"tokenising {source}: {len(text):,} characters")
    documents = split_documents(text)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    num_tokens = write_dataset(documents, prefix, vocab_size)
    _path(prefix, ".done").touch()  # last, so that an interrupted run is repeated
    _print_status(f"wrote {num_tokens:,} tokens in {len(documents):,} documents to {prefix}.bin")
    return prefix


def _path(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _print_status(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> int:
    """Prepare the requested text; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--text", type=Path, metavar="FILE", help="a UTF-8 text of your own")
    parser.add_argument("--cache", type=Path, metavar="DIR", default=Path(".cache/text"))
    parser.add_argument("--vocab-size", type=int, metavar="N", default=2048)
    options = parser.parse_args()
    try:
        prefix = prepare(options.text, options.cache, options.vocab_size)
    except TextError as error:
        _print_status(f"prepare_text.py: {error}")
        return 1
    print(os.fspath(prefix))
    return 0


if __name__ == "__main__":
    sys.exit(main())
