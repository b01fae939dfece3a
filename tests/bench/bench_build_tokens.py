"""How fast text becomes token shards, against the `tokenizers` library's own batch encoding of the
same text in the same number of cores.

python -m tests.bench.bench_build_tokens
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from data.build import tokens as builder
from data.language.python_text import python_text
from data.tokenizer import Bytes

COPIES, VOCABULARY, REPEATS = 1, 4096, 3


def main() -> None:
    """Print the table."""
    cores = len(os.sched_getaffinity(0))
    documents = [
        text
        for text in (
            Bytes()
            .decode(
                [
                    32 if token == 256 else token
                    for token in python_text(16).files["train"][0].tolist()
                ]
            )
            .split("\n\n\n")
        )
        if text
    ]
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "text.jsonl")
        source.write_text(
            "".join(
                json.dumps({"text": f"{text}\n# {copy}"}) + "\n"
                for copy in range(COPIES)
                for text in documents
            )
        )
        size = sum(len(text) for text in documents) * COPIES / 1e6
        common = ["--input", str(source), "--output-dir"]
        assert (
            builder.main(
                [*common, f"{scratch}/bpe", "--train-bpe", str(VOCABULARY), "--bpe-mib", "4"]
            )
            == 0
        )
        from tokenizers import Tokenizer

        library = Tokenizer.from_file(f"{scratch}/bpe/tokenizer.json")
        texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
        times: dict[str, list[float]] = {"encode_batch": [], "data.build.tokens": []}
        for number in range(REPEATS):
            began = time.perf_counter()
            for start in range(0, len(texts), 1000):
                library.encode_batch(texts[start : start + 1000], add_special_tokens=False)
            times["encode_batch"].append(time.perf_counter() - began)
            began = time.perf_counter()
            assert (
                builder.main(
                    [*common, f"{scratch}/{number}", "--tokenizer", f"{scratch}/bpe/tokenizer.json"]
                )
                == 0
            )
            times["data.build.tokens"].append(time.perf_counter() - began)
        for name, seconds in times.items():
            middle = statistics.median(seconds)
            print(f"{name:20} {middle:6.2f} s, {size / middle:6.1f} MB/s on {cores} cores")
        ours, bare = (
            statistics.median(times[name]) for name in ("data.build.tokens", "encode_batch")
        )
        print(f"{ours / bare:.2f} times as long (goal 1.2)")


if __name__ == "__main__":
    main()
