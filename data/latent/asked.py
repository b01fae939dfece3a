"""A passage of the user's own: what readers answer from its latents, beside the same from nothing
and from the whole passage. Latents are written to a file, from which another process can answer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import Tensor

from contract import IGNORE, Arrays, Batch, Examples, Prediction, Report, RunSettings
from data.language.tokens import SampleKeys, shown, unescaped
from data.latent.readers import Reader
from data.tokenizer import Tokenizer
from utils.command.marks import A_RUN, MAY_CHANGE, SAME_RUN
from utils.errors import ConfigError, brief, short
from utils.files import read_text
from utils.measure.scene import scene

SENT = ("numbers", "scales", "encoder")  # the tensors of a file of latents
WAYS = {"latents": "from the latents", "none": "from nothing", "whole": "from the whole passage"}
EXAMPLES = 3  # held-out passages on the report page


class AskKeys(SampleKeys):
    """The keys of every source of passages."""

    readers: Annotated[list[str], A_RUN, MAY_CHANGE]
    """The frozen models that read the texts"""

    passage: Annotated[str | None, SAME_RUN]
    """With eval_only: a text or a file to make latents of, or a latents.safetensors"""

    prompt: Annotated[str | None, SAME_RUN]
    """Text that readers continue after the passage; null: only the latents are written"""


def asked(
    run: RunSettings, keys: AskKeys, tokenizer: Tokenizer, length: int, readers: Sequence[Reader]
) -> dict[str, Examples]:
    """Returns the set `answers`, if there is a passage, which is then evaluated alone. The encoder
    reads `length` tokens.
    """
    if keys.passage is None:
        if keys.prompt is not None:
            raise ConfigError(f"data.prompt={short(keys.prompt)}: add data.passage=TEXT or FILE")
        return {}
    where = f"data.passage={short(keys.passage)}"
    if not run.eval_only:
        raise ConfigError(f"{where}: trained latents answer it; add eval_only=true")
    row: dict[str, Any] = {}
    try:
        if keys.passage.endswith(".safetensors"):
            held = load_file(keys.passage)
            row = {name: held[name] for name in SENT if name in held}
        else:
            text = keys.passage
            text = read_text(Path(text)) if os.path.exists(text) else unescaped(text)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{where}: cannot be read ({brief(error)})") from None
    if not row:
        tokens = tokenizer.encode([text])[0].astype(np.int32)
        if len(tokens) < length:
            raise ConfigError(
                f"{where}: has {len(tokens)} tokens, and these latents stand for {length}; give a"
                " longer text, whose last tokens count"
            )
        row["passage"] = tokens[-length:]
        text = tokenizer.decode(row["passage"].tolist())
        for number, rows in enumerate(reader.read([(text, [("", False)])]) for reader in readers):
            row[f"passage_{number}"] = rows["passage"][0]
    for number, reader in enumerate(readers if keys.prompt else ()):
        row |= {f"{name}_{number}": array for name, array in _prompt(reader, keys).items()}
    row["temperature"], row["top_k"] = np.float32(keys.temperature), np.int32(keys.top_k)
    return {"answers": Examples([row | {"sample_seed": np.int64(run.seed)}])}


def _prompt(reader: Reader, keys: AskKeys) -> Arrays:
    """Returns a prompt in a reader's tokens, with as much room for its continuation as texts had in
    training.
    """
    prompt = reader.tokenizer.encode([unescaped(str(keys.prompt))])[0].astype(np.int32)
    if len(prompt) >= reader.text_len:
        raise ConfigError(
            f"data.prompt={short(keys.prompt)}: takes {len(prompt)} tokens of {reader.where}, and"
            f" texts after a passage have {reader.text_len} with the answer; give a shorter one"
        )
    room = min(keys.max_new_tokens, reader.text_len - len(prompt))
    return {"prompt": prompt, "continuation": np.zeros(room, np.int32)}


class Answers:
    """Shows what each reader answers, and returns the latents as a file."""

    scalars = ()

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers, self._rows = readers, dict[str, Tensor]()

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        if len(indices):
            prompts = {name: rows for name, rows in batch.items() if name.startswith("p")}
            self._rows = {name: rows[:1] for name, rows in (prompts | prediction.outputs).items()}

    def rows(self) -> dict[str, Tensor]:
        return self._rows

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        if not rows:
            return Report()
        sent = {name: rows[name].cpu().numpy()[0] for name in SENT if name in rows}
        size = sum(array.nbytes for name, array in sent.items() if name != "encoder")
        lines = [f"{size:,} bytes of latents are sent, evaluations/*/answers/latents.safetensors"]
        for number, reader in enumerate(self._readers):
            decode = reader.tokenizer.decode
            for way, what in WAYS.items():
                if (answer := rows.get(f"{way}_{number}")) is None:
                    continue
                if way == "whole":
                    text = decode([token for token in rows[f"passage_{number}"][0] if token >= 0])
                    what += f", {len(text.encode()):,} bytes"
                prompt = rows[f"prompt_{number}"][0].tolist()
                lines += [f"reader {number} {what}:", shown(decode(prompt + answer[0].tolist()))]
        return Report(files={"latents.safetensors": save(sent)}, text="\n".join(lines))


class Said:
    """Shows what readers predict from latents alone after the first held-out passages."""

    scalars = ()

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers, self._found = readers, list[dict[str, Tensor]]()

    def add(self, indices: np.ndarray, batch: Batch, prediction: Prediction) -> None:
        first = indices < EXAMPLES
        names = ("passage", "text", "labels", "said")
        rows = batch | prediction.outputs
        wanted = [f"{name}_{number}" for number in range(len(self._readers)) for name in names]
        if first.any() and rows.keys() >= set(wanted):
            chosen = {name: rows[name][: len(indices)].cpu()[first] for name in wanted}
            self._found.append(chosen | {"index": torch.from_numpy(indices[first])})

    def rows(self) -> dict[str, Tensor]:
        names = self._found[0] if self._found else ()
        return {name: torch.cat([part[name] for part in self._found]) for name in names}

    def report(self, rows: Mapping[str, Tensor]) -> Report:
        def text_of(reader: Reader, tokens: Tensor) -> str:
            return shown(reader.tokenizer.decode(tokens[tokens >= 0].tolist()))

        table = []
        for at in rows["index"].argsort().tolist() if rows else ():
            for number, reader in enumerate(self._readers):
                passage, text, labels, said = (
                    rows[f"{name}_{number}"][at] for name in ("passage", "text", "labels", "said")
                )
                # predicted tokens follow tokens that are read: a question, then its answer
                counts, read = labels != IGNORE, torch.cat((text[1:], labels[-1:]))
                texts = [
                    text_of(reader, torch.cat((text[:1], torch.where(counts, told, read))))
                    for told in (labels, said)
                ]
                right, count = int((said == labels)[counts].sum()), int(counts.sum())
                verdict = "right" if right == count else f"wrong: {right} of {count} tokens right"
                table.append([text_of(reader, passage), number, *texts, verdict])
        if not table:
            return Report()
        about = "Each token is predicted from the latents and the true text before it."
        columns = ["passage", "reader", "text", "what the reader says from latents", ""]
        return Report(
            files=scene("said", "table", "From latents alone", about, columns=columns, rows=table)
        )
