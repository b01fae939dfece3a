"""How fast tokens arrive from files, on one core, and what it costs to open very many: seconds, and
memory beyond what was there.

OMP_NUM_THREADS=1 python -m tests.bench.bench_tokens
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from data.language.token_files import HEADER, bin_header
from data.language.tokens import TokenSource
from data.stream import ShardStream, train_loader
from tests.making import make_source

SHARDS, REPEATS = 8, 5
MANY, FILES = 10**10, 100


def resident() -> int:
    """MiB that this process holds."""
    fields = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()
    return int(fields[0]) >> 10


def opened(folder: Path, seq_len: int, batch: int, **more) -> TokenSource:
    made: TokenSource = make_source(
        "tokens",
        seed=0,
        shards=SHARDS,
        global_batch_size=batch,
        max_steps=10**6,
        data_path=str(folder),
        seq_len=seq_len,
        vocab_size=50_304,
        **more,
    )
    return made


def speed(source: TokenSource, tokens: int) -> float:
    """Tokens a second of batches as training gets them, in the training process."""
    rates, steps, first = [], max(4, (1 << 23) // tokens), 0
    for _ in range(REPEATS + 1):
        stream = ShardStream(source, [range(SHARDS)], first, first + steps)
        began = time.perf_counter()
        for _ in train_loader(stream, 0):
            pass
        rates.append(steps * tokens / (time.perf_counter() - began))
        first += steps
    return statistics.median(rates[1:])  # the first fills caches


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "tokens")
        folder.mkdir()
        tokens = np.random.default_rng(0).integers(50_257, size=1 << 25, dtype=np.uint16)
        tokens[::500] = 50_256
        for number, part in enumerate(np.split(tokens, 4)):
            (folder / f"train_{number}.bin").write_bytes(
                bin_header(len(part), part.dtype) + part.tobytes()
            )
        print(
            "tokens/s as int32 inputs and labels, one core, loaded in the training process (goal 20"
            " million)"
        )
        for seq_len, batch in ((2048, 256), (1024, 64), (256, 64), (64, 16)):
            plain = speed(opened(folder, seq_len, batch), seq_len * batch)
            packed = speed(
                opened(folder, seq_len, batch, documents=True, begin_token=50_256), seq_len * batch
            )
            print(
                f"{batch:4} windows of {seq_len:5}: {plain / 1e6:8.1f} M tokens/s; of"
                f" documents {packed / 1e6:8.1f} M"
            )
        sparse = Path(scratch, "sparse")
        sparse.mkdir()
        for number in range(FILES):
            with open(sparse / f"train_{number:03}.bin", "wb") as file:
                file.write(bin_header(MANY // FILES, np.dtype(np.uint16)))
                os.truncate(file.fileno(), HEADER + 2 * MANY // FILES)
        before, began = resident(), time.perf_counter()
        source = opened(sparse, 2048, 256)
        source.train_batch(0, 0)
        seconds, held = time.perf_counter() - began, resident() - before
        print(
            f"opening {MANY:.0e} tokens in {FILES} sparse files: {seconds:.2f} s (goal 1), {held}"
            " MiB more memory (goal 100)"
        )


if __name__ == "__main__":
    main()
