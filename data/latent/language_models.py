"""Opens the tokenizers of the language models that read the data, and their context lengths."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from data.source import RunSettings
from data.tokenizer import FromFile, Tokenizer
from utils.checkpoint import reader
from utils.command.instantiate import make
from utils.errors import ConfigError, brief, said_of
from utils.files import read_text


@dataclass(frozen=True)
class LanguageModel:
    """What the data needs to know about one model."""

    where: str  # for messages
    tokenizer: Tokenizer
    begin: int  # the token before every text
    seq_len: int
    vocab_size: int


def open_model(key: str, path: str) -> LanguageModel:
    """Opens the folder of a run of `arch=gpt`, or of a published model with its tokenizer."""
    where = f"{key}={path}"
    folder = Path(path)
    if os.path.isfile(folder / "config.json"):
        tokenizer, seq_len, size = _published(where, folder)
    else:
        with said_of(key):
            if not os.path.exists(folder):
                raise ConfigError(
                    f"checkpoint={path}: no such file or folder; give the folder of a run, or the"
                    " arguments that make one"
                )
            config = reader.config_in(path)
        try:
            source = make(config.get("data", {}), "data", RunSettings.of(config))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        known: Tokenizer | None = getattr(source, "tokenizer", None)
        if known is None:
            raise ConfigError(
                f"{where}: {source.spec.name} has no tokenizer; give a run of arch=gpt on text"
                " whose tokenizer is known"
            )
        tokenizer, seq_len, size = known, source.spec.seq_len, source.spec.vocab_size
    if tokenizer.begin is None:
        raise ConfigError(
            f"{where}: its tokenizer has no token that begins a text; give a model that has one"
        )
    return LanguageModel(where, tokenizer, tokenizer.begin, seq_len, size)


def _published(where: str, folder: Path) -> tuple[Tokenizer, int, int]:
    if not os.path.isfile(folder / "tokenizer.json"):
        raise ConfigError(
            f"{where}: there is no tokenizer.json; put the one that belongs to these weights beside"
            " them"
        )
    try:
        config = json.loads(read_text(folder / "config.json"))
        return (
            FromFile(where, folder / "tokenizer.json"),
            int(config["max_position_embeddings"]),
            int(config["vocab_size"]),
        )
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where}: config.json cannot be read ({brief(error)}); give a whole folder"
        ) from None
