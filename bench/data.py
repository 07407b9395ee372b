"""Data: tokenising beside the bare tokenizer, windows from a cold file, and what a start costs however many there are.

    python bench/data.py                                              20 minutes or so; needs 4 GB on the disk
    python bench/data.py --mb 8 --rounds 1 --tokens 4000000 --steps 50    a look

tokenise: JSON lines of documents, the Python standard library's sources over and over. A round is the tokenizer's own
batch call with a thread a core on all texts in memory, and `prepare.py build` of the file by as many workers: reading,
hashing, splitting, shards and the workers' start are in its time. Ratios are taken within a round.
cold: shards of random ids, written, synced and dropped from the page cache; no window is read twice. A step of 8
windows of 1,024 tokens is timed as `main` does it: windows are drawn and read for one step, then 4, 16, 64, at last 256
at once, and those after them asked for. Then the process sleeps for 50 ms, in the place of the step of which the shares
are. The same with a warm cache and no pause is in bench/loader.py.
size: manifests of 10^6, 10^8 and 10^10 windows of 1,024 tokens (sparse files), each by a process of its own: seconds
until the data are opened and the first 8 windows read, imports left out, and the memory that took.
Prints a table, then one JSON line.
"""
import argparse
import contextlib
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":  # as a script this file would be taken for the package data
    sys.path[0] = str(ROOT)
    sys.path.append(str(ROOT / "bench"))

from loader import STEP_US, VOCAB, figures, time_loader, write_corpus
from throughput import clocks, foreign_share

WINDOWS = (10**6, 10**8, 10**10)
BLOCK_SIZE, BATCH_SIZE = 1024, 8
SHARD_TOKENS = 5 * 10**11  # a file of 10^12 bytes: file systems have a limit near 16 times that
OPEN = """
import json, sys, time
from pathlib import Path
import numpy, torch
import train

def rss_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

folder, block_size, batch_size = sys.argv[1], *map(int, sys.argv[2:])
before, began = rss_mb(), time.perf_counter()
manifest = train.data_prepare.open_data(folder, "")
stream = train.data_prepare.Tokens(folder, manifest["train"], manifest["vocab_size"])
order = train.token_order([[0, manifest["train"]]])
drawn = train.draw_windows(0, batch_size, order, 1337, block_size)
train.to_batch(stream.windows(drawn[2], block_size + 1), torch.device("cpu"))
print(json.dumps({"seconds": time.perf_counter() - began, "mb": rss_mb() - before}))
"""


# -- tokenise

def documents(most_bytes):
    """Texts of so many bytes, over and over the same ones."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text(errors="replace") for path in sorted(folder.glob("*.py"))]
    found, size = [], 0
    while size < most_bytes:
        found.append(texts[len(found) % len(texts)])
        size += len(found[-1].encode())
    return found


def bare_s(tokenizer, texts, cores):
    """Seconds of the library's own batch call."""
    library = getattr(tokenizer, "library", None)
    if library is None:
        import tiktoken
        encode = functools.partial(tiktoken.get_encoding(tokenizer.identity["name"]).encode_ordinary_batch,
                                   num_threads=cores)
    else:
        encode = functools.partial(library.encode_batch, add_special_tokens=False)
    began = time.perf_counter()
    encode(texts)
    return time.perf_counter() - began


def time_tokenising(word, mb, rounds, cores, folder):
    """[{bare, build: MB/s} of each round]."""
    from data import building, prepare, sources
    tokenizer, texts, found = prepare.named_tokenizer(word), documents(mb * 1e6), []
    size = sum(len(text.encode()) for text in texts)
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    bare_s(tokenizer, texts[:cores], cores)  # what is made at the first use
    for number in range(rounds):
        bare = bare_s(tokenizer, texts, cores)
        given, _ = sources.find_sources([str(folder / "in.jsonl")])
        began = time.perf_counter()
        manifest = building.build_data(folder / f"out{number}", given, tokenizer, workers=cores, progress=False)
        found.append({"bare": size / 1e6 / bare, "build": size / 1e6 / (time.perf_counter() - began)})
        assert manifest["sources"][0]["documents"] == len(texts)
    return found


# -- cold

def drop(folder):
    """Has the kernel forget what the page cache holds of a folder's files."""
    for path in folder.glob("*.bin"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_cold(tokens, steps, step_s, folder):
    """{what: its microseconds each time} of steps that read from a cold cache."""
    import torch

    import train
    shards = write_corpus(folder, tokens)
    drop(folder)
    stream = train.data_prepare.Tokens(folder, shards, VOCAB)
    return time_loader(train, stream, (BLOCK_SIZE, BATCH_SIZE, 1), steps, torch.device("cpu"), step_s=step_s)


# -- size

def write_sparse(folder, windows):
    """A data folder of so many windows, all holes."""
    from data import prepare
    folder.mkdir()
    left, rows = windows * BLOCK_SIZE + 1, []
    while left:
        name, tokens = f"train-{len(rows):05d}.bin", min(left, SHARD_TOKENS)
        with open(folder / name, "wb") as file:
            file.truncate(2 * tokens)
        rows.append(prepare.shard_row(name, tokens, 0, f"{len(rows):064x}"))
        left -= tokens
    prepare.write_manifest(folder, prepare.BYTES, 257, rows, [], [])
    return folder


def time_opening(folder):
    words = [sys.executable, "-c", OPEN, str(folder), str(BLOCK_SIZE), str(BATCH_SIZE)]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=200, help="of text to tokenise")
    parser.add_argument("--rounds", type=int, default=5, help="of tokenising, and of opening each size")
    parser.add_argument("--tokenizer", default="gpt2", help="as of prepare.py build")
    parser.add_argument("--tokens", type=int, default=2_000_000_000, help="in the cold file, two bytes each")
    parser.add_argument("--steps", type=int, default=2_000, help="on it")
    parser.add_argument("--dir", default=None, help="where the files are written (default: that for temporary files)")
    asked, cores = parser.parse_args(), len(os.sched_getaffinity(0))
    import numpy
    import torch  # so that its import is in no time
    before = clocks()
    with tempfile.TemporaryDirectory(dir=asked.dir) as folder, contextlib.redirect_stdout(sys.stderr):
        folder = Path(folder)
        speeds = time_tokenising(asked.tokenizer, asked.mb, asked.rounds, cores, folder)
        timed = time_cold(asked.tokens, asked.steps, STEP_US / 1e6, folder)
        cold = {name: figures(numbers) for name, numbers in timed.items()}
        for path in folder.glob("*.bin"):
            path.unlink()
        folders = {windows: write_sparse(folder / str(windows), windows) for windows in WINDOWS}
        opened = {windows: [] for windows in WINDOWS}
        for _ in range(asked.rounds):
            for windows, place in folders.items():
                opened[windows].append(time_opening(place))
    foreign = foreign_share(before, clocks(), os.cpu_count())
    ratios = sorted(row["build"] / row["bare"] for row in speeds)
    tokenise = {name: round(statistics.median(row[name] for row in speeds), 3) for name in ("bare", "build")}
    tokenise |= {"ratio": round(statistics.median(ratios), 4), "ratios": [round(ratio, 4) for ratio in ratios]}
    size = {f"{windows:.0e}": {key: round(statistics.median(row[key] for row in rows), 4) for key in ("seconds", "mb")}
            for windows, rows in opened.items()}
    print(f"other work took {foreign:.0%} of the machine; {cores} cores")
    print(f"tokenise {asked.mb:,.0f} MB by {asked.tokenizer}: build {tokenise['build']:.2f} MB/s, the tokenizer alone "
          f"{tokenise['bare']:.2f} MB/s; ratio {tokenise['ratio']:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    for name, row in cold.items():
        shares = ", ".join(f"{key} {row[f'{key}_us']:,.1f} us ({row[f'{key}_share']:.3%})" for key in (
            "mean", "median", "p99", "max"))
        print(f"cold, 8 x 1,024 of {2 * asked.tokens / 1e9:,.2f} GB, {name}: {shares} of 50 ms, n {row['n']}")
    for name, row in size.items():
        print(f"{name} windows: opened and 8 read in {row['seconds'] * 1000:7.2f} ms, {row['mb']:.1f} MB")
    print(json.dumps({"bench": "data", "tokenise": tokenise, "cold": cold, "size": size, "rounds": asked.rounds,
                      "mb": asked.mb, "tokenizer": asked.tokenizer, "tokens": asked.tokens, "steps": asked.steps,
                      "foreign": round(foreign, 4), "cores": cores, "python": platform.python_version(),
                      "numpy": numpy.__version__, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
