"""Text to token shards, and the tokenizers that read them back.

    python data/prepare.py build INPUT... --out DIR   files and folders of text; a file is one document
    python data/prepare.py stdlib --out DIR           the Python standard library's own sources, as bytes
    python data/prepare.py import FILE... --out DIR   nanoGPT's or llm.c's token files, linked and not copied
    python data/prepare.py verify DIR                 read every shard and compare it with the manifest

A data folder holds manifest.json and shards (train-00000.bin, ...) of little-endian uint16 token ids; the
end-of-text id (eot) ends each document. It appears whole or not at all: it is written under a temporary name
beside its place, manifest last, and then renamed.

Validation is split by document: a document belongs to val where the hash of its first MiB lies in the lowest
val_ratio of all 64-bit values. So its side depends neither on its name nor on the order of the files nor on
what else is there. Where this leaves val empty, the document with the lowest hash is taken.

Text passes through in chunks of at most 1 MiB, so memory does not grow with the input, and the bytes written
are the same for any number of workers.
"""

import argparse
import base64
import bisect
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import sys
import sysconfig
import threading
import time
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import NamedTuple

import numpy as np

FORMAT = 1
ID = np.dtype("<u2")  # a token id on disk
LARGEST_VOCAB = 1 << 16
LLMC_HEADER = 1024  # bytes before the ids in llm.c's files
READS_PER_MAP = 4096  # memory maps are opened anew after so many reads: resident memory stays bounded
OPEN_SHARDS = 128  # maps held, each with a file descriptor
HASH_BYTES_PER_S = 200e6
CHUNK = 1 << 20  # bytes of text encoded at a time
END_OF_TEXT = b"<|endoftext|>"

BYTES = {"kind": "bytes", "name": "bytes",
         "sha256": hashlib.sha256(b"ids 0-255 are the bytes of UTF-8, 256 is eot").hexdigest(), "eot": 256}
GPT2 = {"kind": "tiktoken", "name": "gpt2",
        "sha256": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930", "eot": 50256}
NO_TOKENIZER = {"kind": "none", "name": "", "sha256": "", "eot": -1}


# -- tokenizers


class Tokenizer:
    """Text to token ids and back; load_tokenizer makes one."""

    def __init__(self, identity, texts, specials, encode_bytes):
        self.identity = identity  # the manifest's "tokenizer"
        self.eot = identity["eot"]
        self.vocab_size = len(texts)
        self.encode_bytes = encode_bytes  # UTF-8 as bytes -> integer array of ids, never a special one
        self._texts = texts
        self._specials = specials

    def encode(self, text):
        """The ids of a text, without eot."""
        return self.encode_bytes(text.encode("utf-8", "replace")).tolist()

    def decode(self, ids):
        """The text of any ids; bytes that are not UTF-8 and ids beyond the vocabulary become U+FFFD."""
        known = len(self._texts)
        return b"".join(self._texts[i] if i < known else b"\xff" for i in ids).decode("utf-8", "replace")

    def token_bytes(self):
        """int64 [vocab_size]: bytes of text per id, 0 for eot; all 0 where there is no tokenizer."""
        sizes = [0 if i in self._specials else len(text) for i, text in enumerate(self._texts)]
        return np.array(sizes, np.int64)


def load_tokenizer(identity, vocab_size=0):
    """The tokenizer that a manifest or model.json names; kind 'none', whose text is ids, needs vocab_size.

    Raises ValueError where it is unknown, out of reach, or not the one whose sha256 is recorded ('': any).
    """
    kind, name, recorded = identity["kind"], identity["name"], identity["sha256"]
    if kind == "bytes":
        tokenizer = byte_tokenizer()
    elif kind == "tiktoken":
        tokenizer = tiktoken_tokenizer(name)
    elif kind == "none":
        tokenizer = id_tokenizer(vocab_size)
    else:
        raise ValueError(f"tokenizer kind {kind!r} is not known here; 'bytes', 'tiktoken' and 'none' are")
    if recorded not in ("", tokenizer.identity["sha256"]):
        raise ValueError(f"tokenizer {name!r} is not the one the data was made with: its sha256 is "
                         f"{tokenizer.identity['sha256']}, recorded is {recorded}")
    return tokenizer


def named_tokenizer(word):
    """The identity to load for a tokenizer named on the command line."""
    known = {"bytes": BYTES, "gpt2": GPT2, "none": NO_TOKENIZER}
    return known.get(word, {"kind": "tiktoken", "name": word, "sha256": ""})


def byte_tokenizer():
    texts = [bytes([i]) for i in range(256)] + [END_OF_TEXT]
    return Tokenizer(BYTES, texts, {BYTES["eot"]}, lambda data: np.frombuffer(data, np.uint8))


def id_tokenizer(vocab_size):
    if not 1 <= vocab_size <= LARGEST_VOCAB:
        raise ValueError("without a tokenizer the vocabulary size must be given (--vocab-size), from 1 to "
                         f"{LARGEST_VOCAB:,}; got {vocab_size:,}")

    def parse(data):
        if not re.fullmatch(rb"[0-9\s]*", data):
            raise ValueError("this data has no tokenizer, so its text is token ids like '12 7 300', got "
                             + repr(data[:40].decode("utf-8", "replace")))
        return np.array([int(word) for word in data.split()], np.int64)

    return Tokenizer(NO_TOKENIZER, [b"%d " % i for i in range(vocab_size)], range(vocab_size), parse)


def tiktoken_tokenizer(name):
    """A tiktoken encoding; its sha256 is that of its .tiktoken file (for gpt2: of r50k_base.tiktoken)."""
    try:
        import tiktoken
    except ImportError:
        raise ValueError(f"tokenizer {name!r} needs the package tiktoken: pip install tiktoken, or use the "
                         "tokenizer 'bytes'") from None
    if name not in tiktoken.list_encoding_names():
        raise ValueError(f"tokenizer {name!r} is not known; bytes, gpt2, r50k_base and p50k_base are")
    try:
        encoding = tiktoken.get_encoding(name)
    except OSError as error:  # every network failure of requests is one
        raise ValueError(
            f"tiktoken could not fetch the vocabulary of {name!r} ({type(error).__name__}). Either use the "
            "tokenizer 'bytes', which needs nothing, or run this where there is a network:\n"
            f"  TIKTOKEN_CACHE_DIR=vocab python -c \"import tiktoken; tiktoken.get_encoding('{name}')\"\n"
            "then copy the folder 'vocab' here and set TIKTOKEN_CACHE_DIR to it") from error
    if encoding.n_vocab > LARGEST_VOCAB:
        raise ValueError(f"tokenizer {name!r} has {encoding.n_vocab:,} ids and uint16 shards hold at most "
                         f"{LARGEST_VOCAB:,}; use gpt2, r50k_base, p50k_base or bytes")
    texts, specials, sha256 = [b""] * encoding.n_vocab, set(), hashlib.sha256()
    for i in range(encoding.n_vocab):
        with contextlib.suppress(KeyError):  # an encoding may leave ids unused
            texts[i] = encoding.decode_single_token_bytes(i)
            if encoding.is_special_token(i):
                specials.add(i)
            else:
                sha256.update(base64.b64encode(texts[i]) + b" %d\n" % i)
    identity = {"kind": "tiktoken", "name": name, "sha256": sha256.hexdigest(), "eot": encoding.eot_token}

    def encode(data):
        return np.array(encoding.encode_ordinary(data.decode("utf-8", "replace")), np.int64)

    return Tokenizer(identity, texts, specials, encode)


# -- the manifest


def read_manifest(data_dir):
    """The checked manifest of a data folder, judged by file names and sizes: no shard is opened.

    Raises ValueError naming every problem.
    """
    manifest = load_manifest(data_dir)
    problems = manifest_problems(manifest)
    for shard in all_shards(manifest):
        problems += shard_problems(data_dir, shard)
    if problems:
        raise ValueError(f"the data in {data_dir} cannot be used:\n  " + "\n  ".join(problems))
    return manifest


def fingerprint(manifest):
    """sha256 of what a run depends on: dtype, vocabulary, tokenizer and shards, not where they came from."""
    seen = {key: manifest[key] for key in ("dtype", "vocab_size", "tokenizer", "train", "val")}
    return hashlib.sha256(json.dumps(seen, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load_manifest(data_dir):
    path = Path(data_dir) / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        if not isinstance(manifest, dict):
            raise ValueError("no JSON object")
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{data_dir} is no data folder: it has no manifest.json. "
                         "'python data/prepare.py --help' says how to make one") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); build or import the data again") from None
    return manifest


def all_shards(manifest):
    """The rows of train, then those of val (where one is no list, manifest_problems says so)."""
    lists = [manifest.get(split) for split in ("train", "val")]
    return [shard for shards in lists if isinstance(shards, list) for shard in shards]


def has_fields(row, fields):
    return isinstance(row, dict) and all(type(row.get(name)) is kind for name, kind in fields.items())


def manifest_problems(manifest):
    """What is wrong with a manifest, its shards apart."""
    problems = []
    for key, wanted in (("format", FORMAT), ("dtype", "uint16")):
        if manifest.get(key) != wanted:
            problems.append(f"{key} is {manifest.get(key)!r}, only {wanted!r} is read here")
    vocab_size, tokenizer = manifest.get("vocab_size"), manifest.get("tokenizer")
    if type(vocab_size) is not int or not 1 <= vocab_size <= LARGEST_VOCAB:
        problems.append(f"vocab_size is {vocab_size!r}, not a whole number from 1 to {LARGEST_VOCAB:,}")
    if not has_fields(tokenizer, {"kind": str, "name": str, "sha256": str, "eot": int}):
        problems.append(f"tokenizer is {tokenizer!r}, not an object with kind, name, sha256 and a number eot")
    elif type(manifest.get("vocab_size")) is int and tokenizer["eot"] >= manifest["vocab_size"]:
        problems.append(f"tokenizer: its eot {tokenizer['eot']:,} lies beyond vocab_size {manifest['vocab_size']:,}")
    for key in ("train", "val", "sources"):
        if not isinstance(manifest.get(key), list):
            problems.append(f"{key} is {manifest.get(key)!r}, not a list")
    if manifest.get("train") == []:
        problems.append("train lists no shard")
    times = Counter(shard["file"] for shard in all_shards(manifest) if has_fields(shard, {"file": str}))
    problems += [f"{name} is listed {n} times" for name, n in times.items() if n > 1]
    return [f"manifest.json: {problem}" for problem in problems]


def shard_problems(data_dir, shard):
    """What is wrong with a shard's row, and with its file as far as the size tells."""
    fields = {"file": str, "tokens": int, "bytes": int, "header_bytes": int, "sha256": str}
    if not has_fields(shard, fields):
        return [f"manifest.json: shard {shard!r} lacks a file, tokens, bytes, header_bytes or sha256"]
    name, tokens, size, header, _ = (shard[key] for key in fields)
    if name != os.path.basename(name) or name in ("", ".", ".."):
        return [f"manifest.json: shard {name!r} is not the name of a file in this folder"]
    problems = []
    if header not in (0, LLMC_HEADER):
        problems.append(f"{name}: header_bytes is {header}, not 0 or {LLMC_HEADER}")
    if tokens < 1 or size != header + 2 * tokens:
        problems.append(f"{name}: {tokens:,} tokens after {header:,} header bytes do not make {size:,} bytes")
    try:
        found = os.stat(os.path.join(data_dir, name)).st_size
    except FileNotFoundError:
        return problems + [f"{name}: the file is missing"]
    if found != size:
        problems.append(f"{name}: {found:,} bytes on disk, {size:,} in the manifest")
    return problems


# -- reading: what the trainer uses


def open_data(data_dir, build):
    """The checked manifest of a data folder; build='stdlib' makes the embedded corpus where there is no folder."""
    if build == "stdlib" and not (os.path.isdir(data_dir) and os.listdir(data_dir)):
        print(f"building the embedded corpus (Python's own sources, as bytes) in {data_dir}", flush=True)
        build_stdlib(data_dir)
    return read_manifest(data_dir)


def open_tokenizer(manifest, say):
    """The tokenizer of the data, or None with a word why where it cannot be had."""
    if manifest["tokenizer"]["kind"] == "none":
        return None
    try:
        return load_tokenizer(manifest["tokenizer"])
    except (ValueError, OSError) as error:
        return say(f"no samples and no bits per byte: {error}")


def grown(recorded, present):
    """`present` (a shard list) if it has grown from `recorded`, else None.

    Raises ValueError where the recorded list is not a prefix of it.
    """
    for old, new in zip(recorded, present):
        if (old["sha256"], old["tokens"]) != (new["sha256"], new["tokens"]):
            raise ValueError(f"the data has changed under this run: train shard {old['file']} was recorded with sha256 "
                             f"{old['sha256'][:12]}, the manifest has {new['file']} with {new['sha256'][:12]} in its "
                             "place; shards may be appended, never changed")
    if len(present) < len(recorded):
        raise ValueError(f"the data has shrunk under this run: {len(recorded)} train shards were recorded, the "
                         f"manifest has {len(present)}; missing from {recorded[len(present)]['file']} on")
    return present if len(present) > len(recorded) else None


def growth(data_dir, recorded):
    """The train shards of a folder where they have grown from the list `recorded`, else None. Raises as `grown`."""
    return grown(recorded, read_manifest(data_dir)["train"])


def check_fingerprint(manifest, recorded, data_dir):
    """Raises ValueError where the data are not those whose fingerprint is recorded."""
    if (found := fingerprint(manifest)) != recorded:
        raise ValueError(f"the data in {data_dir} are not those of this run: vocabulary, tokenizer or validation "
                         f"shards differ (fingerprint {recorded[:12]} was recorded, found {found[:12]})")


class Tokens:
    """The tokens of a list of shards as one stream, read by slices of memory maps; resident memory is bounded.

    `seconds` counts the time spent in reading.
    """

    def __init__(self, folder, shards, vocab_size):
        self.folder, self.shards, self.vocab_size = folder, shards, vocab_size
        self.starts = [0]
        for shard in shards:
            self.starts.append(self.starts[-1] + shard["tokens"])
        self.maps, self.reads, self.seconds = OrderedDict(), 0, 0.0

    def __len__(self):
        return self.starts[-1]

    def shard_at(self, token):
        return bisect.bisect_right(self.starts, token) - 1

    def mapped(self, number):
        if number not in self.maps:
            shard = self.shards[number]
            self.maps[number] = np.memmap(os.path.join(self.folder, shard["file"]), "<u2", "r",
                                          offset=shard["header_bytes"], shape=(shard["tokens"],)).view(np.ndarray)
            if len(self.maps) > OPEN_SHARDS:
                self.maps.popitem(last=False)
        return self.maps[number]

    def windows(self, starts, length):
        """int64 [len(starts), length]: the tokens from each start on.

        Raises ValueError at an id beyond the vocabulary.
        """
        began = time.perf_counter()
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts):
            self.fill(int(start), row)
        if len(out) and out.max() >= self.vocab_size:
            row, column = np.unravel_index(out.argmax(), out.shape)
            token = int(starts[row]) + int(column)
            number = self.shard_at(token)
            path = os.path.join(self.folder, self.shards[number]["file"])
            raise ValueError(f"{path}: token {token - self.starts[number]:,} is {out.max()}, beyond the vocabulary of "
                             f"{self.vocab_size:,}")
        self.seconds += time.perf_counter() - began
        return out

    def fill(self, start, row):
        """Copies the tokens from `start` on into `row`, across as many shards as it takes."""
        if self.reads == READS_PER_MAP:
            self.maps.clear()
            self.reads = 0
        self.reads += 1
        filled = 0
        while filled < len(row):
            number = self.shard_at(start + filled)
            offset = start + filled - self.starts[number]
            piece = self.mapped(number)[offset:offset + len(row) - filled]
            row[filled:filled + len(piece)] = piece
            filled += len(piece)


class ShardHasher:
    """Hashes the shards that a run reads in a low-priority thread, at a bounded rate; `damage` is what it found."""

    def __init__(self, folder, enabled=True):
        self.folder, self.enabled, self.damage = folder, enabled, ""
        self.known, self.waiting, self.stopped = set(), deque(), threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)

    def reads(self, stream, starts, block_size):
        """Notes the shards that windows at `starts` touch, and starts the thread at the first."""
        if not self.enabled:
            return
        spans = {(stream.shard_at(int(start)), stream.shard_at(int(start) + block_size)) for start in starts}
        for number in sorted({number for first, last in spans for number in range(first, last + 1)}):
            shard = stream.shards[number]
            if shard["file"] not in self.known:
                self.known.add(shard["file"])
                self.waiting.append(shard)
        if self.waiting and self.thread.ident is None:
            self.thread.start()

    def work(self):
        if hasattr(os, "setpriority"):
            with contextlib.suppress(OSError):  # a courtesy to training; some hosts forbid it
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not self.damage and not self.stopped.wait(0 if self.waiting else 0.2):
            if self.waiting:
                self.check(self.waiting.popleft())

    def check(self, shard):
        path, digest = os.path.join(self.folder, shard["file"]), hashlib.sha256()
        try:
            with open(path, "rb", buffering=0) as file:
                while (piece := file.read(1 << 20)) and not self.stopped.wait(len(piece) / HASH_BYTES_PER_S):
                    digest.update(piece)
        except OSError as error:
            self.damage = f"{path} cannot be read: {error}"
            return
        if not self.stopped.is_set() and digest.hexdigest() != shard["sha256"]:
            self.damage = (f"{path} has sha256 {digest.hexdigest()[:12]}, its data manifest says "
                           f"{shard['sha256'][:12]}: the file changed after it was prepared")

    def close(self):
        self.stopped.set()
        if self.thread.ident is not None:
            self.thread.join()


# -- writing a data folder


@contextlib.contextmanager
def new_folder(out_dir):
    """A temporary folder that becomes out_dir where the body ends well and is removed where it does not.

    A killed process leaves its temporary folder behind; the next one that builds out_dir removes it.
    """
    out_dir = Path(out_dir).absolute()
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise ValueError(f"{out_dir} exists and is not an empty folder; name another, or remove it first")
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(out_dir)
    folder = out_dir.parent / f".{out_dir.name}.tmp-{os.getpid()}-{platform.node()}"
    folder.mkdir()
    try:
        yield folder
        fsync_folder(folder)
        os.rename(folder, out_dir)  # fails where out_dir has been filled meanwhile
        fsync_folder(out_dir.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale(out_dir):
    """Removes what builds of out_dir that were killed on this host have left."""
    name = re.compile(re.escape(f".{out_dir.name}.tmp-") + r"(\d+)-" + re.escape(platform.node()))
    for folder in out_dir.parent.iterdir():
        if (found := name.fullmatch(folder.name)) and not is_another_process(int(found[1])):
            print(f"removing {folder}, which a killed build has left", file=sys.stderr)
            shutil.rmtree(folder)


def is_another_process(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()  # a new container may give us the pid of a killed build


def fsync_folder(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder, tokenizer, vocab_size, train, val, sources):
    manifest = {"format": FORMAT, "dtype": "uint16", "vocab_size": vocab_size, "tokenizer": tokenizer,
                "train": train, "val": val, "sources": sources}
    with open(folder / "manifest.json", "w") as file:
        file.write(json.dumps(manifest, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    return manifest


def shard_row(name, tokens, header_bytes, sha256):
    return {"file": name, "tokens": tokens, "bytes": header_bytes + 2 * tokens, "header_bytes": header_bytes,
            "sha256": sha256}


class ShardWriter:
    """Writes the token stream of a split as files of shard_tokens tokens each, the last one shorter."""

    def __init__(self, folder, split, shard_tokens):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.rows = []  # of the files completed
        self.file = None

    def write(self, ids):
        while len(ids):
            if self.file is None:
                self.name = f"{self.split}-{len(self.rows):05d}.bin"
                self.file = open(self.folder / self.name, "wb")
                self.tokens, self.sha256 = 0, hashlib.sha256()
            part = ids[:self.shard_tokens - self.tokens]
            ids = ids[len(part):]
            self.file.write(part.data)
            self.sha256.update(part.data)
            self.tokens += len(part)
            if self.tokens == self.shard_tokens:
                self.finish()

    def finish(self):
        """Completes the file under way and returns the rows of all files."""
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.rows.append(shard_row(self.name, self.tokens, 0, self.sha256.hexdigest()))
            self.file = None
        return self.rows


class Progress:
    """How far a command is, on stderr: a line that moves on a terminal, a new line every 30 s elsewhere."""

    def __init__(self, total_bytes, shown):
        self.total, self.shown, self.done, self.tokens = total_bytes, shown, 0, 0
        self.terminal = sys.stderr.isatty()
        self.started = self.printed = time.monotonic()

    def add(self, size, tokens):
        self.done, self.tokens = self.done + size, self.tokens + tokens
        now = time.monotonic()
        if not self.shown or now - self.printed < (0.2 if self.terminal else 30):
            return
        self.printed = now
        share, seconds = min(self.done / self.total, 1), now - self.started
        left = time.strftime("%H:%M:%S", time.gmtime(seconds / share - seconds))
        done, total = self.done / 1e6, self.total / 1e6
        line = (f"{share:4.0%} [{'#' * int(20 * share):20}] {done:,.0f} of {total:,.0f} MB, "
                f"{done / seconds:,.1f} MB/s, {self.tokens:,} tokens, {left} left")
        print(f"\r{line}\033[K" if self.terminal else f"{line}\n", end="", file=sys.stderr, flush=True)

    def end(self):
        if self.shown and self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# -- reading text


class Source(NamedTuple):
    """A row of the manifest's sources and the text files behind it."""
    name: str
    revision: str
    files: list


class Piece(NamedTuple):
    """A document, or a chunk of a long one."""
    source: int
    split: str
    file: str
    data: bytes
    ends: bool  # whether its document ends with it


def find_sources(inputs):
    """A source per file or folder named, and the binary files left out; a file met twice is taken once."""
    missing = [given for given in inputs if not os.path.exists(given)]
    if missing:
        raise ValueError("no such file or folder: " + ", ".join(missing))
    if strange := [given for given in inputs if not (os.path.isfile(given) or os.path.isdir(given))]:
        raise ValueError("neither a file nor a folder: " + ", ".join(strange))
    sources, binary, seen = [], [], set()
    for given in inputs:
        files = []
        for path in walk(given) if os.path.isdir(given) else [given]:
            if os.path.realpath(path) not in seen:
                seen.add(os.path.realpath(path))
                (binary if is_binary(path) else files).append(path)
        sources.append(Source(given, "", files))
    return sources, binary


def walk(folder, left_out=()):
    """The regular files below a folder, hidden ones apart, in an order that is the same on every machine."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith(".") or entry.name in left_out:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from walk(entry.path, left_out)
        elif entry.is_file():
            yield entry.path


def is_binary(path):
    with open(path, "rb") as file:
        return b"\0" in file.read(8192)


def read_chunks(path, separator):
    """Yields (starts, bytes, ends) for the documents of a file, which separator parts (b'': the file is one).

    A document over CHUNK bytes comes in several chunks, whose borders depend on that document alone; one of
    nothing but blanks is dropped.
    """
    data, begin, starts, more = b"", 0, True, True
    with open(path, "rb") as file:
        while True:
            found = data.find(separator, begin) if separator else -1
            end = found if found >= 0 else len(data)
            if found < 0 and more and end - begin <= CHUNK + len(separator):
                block = file.read(CHUNK)
                data, begin, more = data[begin:] + block, 0, bool(block)
            elif end - begin > CHUNK:
                cut = cut_point(data, begin)
                yield starts, data[begin:cut], False
                begin, starts = cut, False
            else:
                text = data[begin:end]
                if not starts or text.strip():
                    yield starts, text, True
                if found < 0:
                    return
                begin, starts = found + len(separator), True


# first bytes of UTF-8 characters that are no white space: that begins with ASCII, C2, E1, E2 or E3
BEGINS_WORD = frozenset([*range(0x21, 0x7F), *range(0xC3, 0xE1), *range(0xE4, 0xF5)])


def cut_point(data, begin):
    """Where the chunk that begins there ends, at most CHUNK bytes on.

    It ends before the last newline, or else space, that a word follows: GPT-2's pattern never joins such a
    blank to what is before it, so the ids are those of the uncut text. Else it ends between two characters.
    """
    limit = begin + CHUNK
    for blank in (b"\n", b" "):
        cut = data.rfind(blank, begin + 1, limit)
        while cut >= 0 and data[cut + 1] not in BEGINS_WORD:
            cut = data.rfind(blank, begin + 1, cut)
        if cut >= 0:
            return cut
    for cut in range(limit, max(limit - 4, begin), -1):
        if not 0x80 <= data[cut] < 0xC0:  # not inside a character
            return cut
    return limit


def document_hash(first_chunk):
    return int.from_bytes(hashlib.sha256(first_chunk).digest()[:8], "big")


def val_limit(sources, separator, val_ratio):
    """The document hash below which a document belongs to val, such that neither side is empty (0: no val).

    Raises ValueError where there are not two documents to part.
    """
    limit = int(val_ratio * 2**64)
    count, below, lowest, highest = 0, 0, 2**64, -1
    for path in (path for source in sources for path in source.files):
        for starts, data, _ in read_chunks(path, separator):
            if starts:
                value = document_hash(data)
                count, below = count + 1, below + (value < limit)
                lowest, highest = min(value, lowest), max(value, highest)
            if not separator:
                break  # what follows belongs to the same document
    if count == 0:
        raise ValueError("there is no text in " + ", ".join(source.name for source in sources))
    if val_ratio and lowest == highest:
        found = "one document" if count == 1 else f"{count:,} documents that begin with the same text"
        raise ValueError(f"validation is split by document, and the input holds {found}. With --val-ratio 0 "
                         "there is no validation, with --document-separator TEXT a file has many documents")
    if val_ratio and below == 0:
        return lowest + 1
    return highest if below == count else limit


def read_pieces(sources, separator, limit):
    for number, source in enumerate(sources):
        for path in source.files:
            for starts, data, ends in read_chunks(path, separator):
                if starts:
                    split = "val" if document_hash(data) < limit else "train"
                yield Piece(number, split, path, data, ends)


# -- encoding, here or in workers


class Encoded(NamedTuple):
    """What became of neighbouring pieces of one source and split."""
    source: int
    split: str
    ids: np.ndarray  # uint16
    documents: int
    size: int  # bytes of text
    not_utf8: set  # files


def piece_ids(tokenizer, piece):
    """The uint16 ids of a piece, eot included; refuses an id that the vocabulary or uint16 cannot hold."""
    ids = tokenizer.encode_bytes(piece.data)
    held = min(tokenizer.vocab_size, LARGEST_VOCAB)
    if int(ids.max(initial=0)) >= held:
        raise ValueError(f"{piece.file}: the tokenizer made id {ids.max():,}; with its vocabulary of "
                         f"{tokenizer.vocab_size:,}, shards hold ids below {held:,}. Nothing was written")
    return np.append(ids.astype(ID), np.array([tokenizer.eot] * piece.ends, ID))


def is_utf8(data):
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def encode_batch(tokenizer, pieces):
    encoded = []
    for (source, split), run in itertools.groupby(pieces, key=lambda piece: (piece.source, piece.split)):
        run = list(run)
        encoded.append(Encoded(source, split,
                               ids=np.concatenate([piece_ids(tokenizer, piece) for piece in run]),
                               documents=sum(piece.ends for piece in run),
                               size=sum(len(piece.data) for piece in run),
                               not_utf8={piece.file for piece in run if not is_utf8(piece.data)}))
    return encoded


def batches(pieces):
    """Lists of pieces that hold CHUNK bytes or a little more, so that a task is worth its way to a worker."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.data)
        if size >= CHUNK:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def start_worker(identity):
    global worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to answer
    threading.Thread(target=exit_with_parent, daemon=True).start()
    worker_tokenizer = load_tokenizer(identity)


def exit_with_parent():
    """Ends a worker whose parent was killed, which would wait for ever for its next task."""
    multiprocessing.parent_process().join()
    os._exit(1)


def encode_in_worker(pieces):
    return encode_batch(worker_tokenizer, pieces)


def encode_all(pieces, tokenizer, workers):
    """Yields Encoded in the order of the pieces; few batches are in memory at a time."""
    if workers == 1:
        for batch in batches(pieces):
            yield from encode_batch(tokenizer, batch)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, spawn, start_worker, (tokenizer.identity,))
    try:
        waiting = deque()
        for batch in batches(pieces):
            waiting.append(pool.submit(encode_in_worker, batch))
            if len(waiting) > 2 * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


# -- building, importing, verifying


def build_data(out_dir, sources, tokenizer, separator="", val_ratio=0.01, shard_tokens=100_000_000, workers=1,
               progress=True):
    """Encodes the sources into a new data folder and returns its manifest."""
    if not 0 <= val_ratio < 1 or shard_tokens < 1 or workers < 1:
        raise ValueError("wanted are 0 <= --val-ratio < 1, --shard-tokens >= 1 and --workers >= 1, "
                         f"got {val_ratio}, {shard_tokens} and {workers}")
    total = sum(os.path.getsize(path) for source in sources for path in source.files)
    # as many as there is work for, and none where encoding costs less than the way to a worker
    workers = 1 if tokenizer.identity["kind"] == "bytes" else min(workers, total // CHUNK + 1)
    with new_folder(out_dir) as folder:
        limit = val_limit(sources, separator.encode(), val_ratio)
        writers = {split: ShardWriter(folder, split, shard_tokens) for split in ("train", "val")}
        rows = [{"name": source.name, "revision": source.revision, "documents": 0, "tokens": 0}
                for source in sources]
        bar, not_utf8 = Progress(total, progress), set()
        for encoded in encode_all(read_pieces(sources, separator.encode(), limit), tokenizer, workers):
            writers[encoded.split].write(encoded.ids)
            rows[encoded.source]["documents"] += encoded.documents
            rows[encoded.source]["tokens"] += len(encoded.ids)
            not_utf8 |= encoded.not_utf8
            bar.add(encoded.size, len(encoded.ids))
        bar.end()
        if not_utf8 and tokenizer.identity["kind"] != "bytes":
            report("not UTF-8, bytes that fail became U+FFFD", not_utf8)
        return write_manifest(folder, tokenizer.identity, tokenizer.vocab_size, writers["train"].finish(),
                              writers["val"].finish(), rows)


def build_stdlib(out_dir, progress=True):
    """Builds the embedded corpus, the standard library's own sources without tests; returns its manifest."""
    folder = sysconfig.get_path("stdlib")
    left_out = ("test", "tests", "idle_test", "site-packages", "dist-packages")
    files = [path for path in walk(folder, left_out)
             if path.endswith(".py") and "_sysconfigdata" not in path]  # that one differs per machine
    if not files:
        raise ValueError(f"this Python keeps no sources in {folder}; use 'build' with text of your own")
    source = Source("python-stdlib", platform.python_version(), files)
    return build_data(out_dir, [source], byte_tokenizer(), val_ratio=0.05, progress=progress)


def scan(path, header_bytes, vocab_size, eot, bar):
    """Reads a shard through: its sha256, the number of eot ids, and what is beyond the vocabulary or ''."""
    sha256, documents, beyond, position = hashlib.sha256(), 0, "", 0
    with open(path, "rb") as file:
        sha256.update(file.read(header_bytes))
        while block := file.read(4 * CHUNK):
            sha256.update(block)
            ids = np.frombuffer(block, ID)
            documents += int(np.count_nonzero(ids == eot))
            if not beyond and int(ids.max()) >= vocab_size:
                at = int(np.argmax(ids >= vocab_size))
                beyond = f"token {position + at:,} is id {ids[at]:,}, the vocabulary has {vocab_size:,}"
            position += len(ids)
            bar.add(len(block), len(ids))
    return sha256.hexdigest(), documents, beyond


def verify(data_dir, progress=True):
    """The manifest of a data folder and every problem that reading all its shards has shown.

    Raises ValueError where the manifest itself cannot be used.
    """
    manifest = load_manifest(data_dir)
    problems = manifest_problems(manifest)
    if problems:
        raise ValueError(f"{data_dir} cannot be verified:\n  " + "\n  ".join(problems))
    by_size = [(shard, shard_problems(data_dir, shard)) for shard in all_shards(manifest)]
    bar = Progress(sum(shard["bytes"] for shard, wrong in by_size if not wrong), progress)
    for shard, wrong in by_size:
        problems += wrong
        if not wrong:
            name, path = shard["file"], os.path.join(data_dir, shard["file"])
            sha256, _, beyond = scan(path, shard["header_bytes"], manifest["vocab_size"], -1, bar)
            if sha256 != shard["sha256"]:
                problems.append(f"{name}: sha256 is {sha256}, in the manifest {shard['sha256']}")
            if beyond:
                problems.append(f"{name}: {beyond}")
    bar.end()
    return manifest, problems


def header_of(path):
    """The bytes before the ids of a token file: 0 in nanoGPT's, 1024 in llm.c's.

    Raises ValueError for a file of any other kind.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        head = file.read(12)
    magic, version, tokens = np.frombuffer(head.ljust(12, b"\0"), "<i4").tolist()
    if head.startswith(b"\x93NUMPY"):
        raise ValueError(f"{path}: a NumPy file; np.load(FILE).astype('<u2').tofile('train.bin') converts it")
    if magic == 20240801:
        raise ValueError(f"{path}: uint32 ids for Llama 3 (magic {magic}); only uint16 ids can be read")
    if magic == 20240522:
        raise ValueError(f"{path}: an evaluation set of llm.c (magic {magic}), not a stream of tokens")
    if magic == 20240520:
        if version != 1 or tokens < 1 or size != LLMC_HEADER + 2 * tokens:
            raise ValueError(f"{path}: the llm.c header says version {version} and {tokens:,} tokens; in "
                             f"version 1 that is {LLMC_HEADER + 2 * tokens:,} bytes, the file has {size:,}")
        return LLMC_HEADER
    if size == LLMC_HEADER + 2 * tokens:
        raise ValueError(f"{path}: a header like llm.c's, but of unknown kind (magic {magic}, version {version})")
    if size == 0 or size % 2:
        raise ValueError(f"{path}: {size:,} bytes are not a whole number of uint16 ids")
    return 0


def import_tokens(out_dir, files, val_files, tokenizer, vocab_size, progress=True):
    """Makes a data folder of links to token files, read once, and returns its manifest.

    tokenizer is an identity. Validation is val_files and those files that have 'val' as a word in their name.
    """
    paths = [Path(path).resolve() for path in [*files, *val_files]]
    val = {path for path in paths if re.search("(?<![a-z])val(?![a-z])|validation", path.name.lower())}
    val.update(paths[len(files):])
    problems = [f"{path}: named twice" for path, times in Counter(paths).items() if times > 1]
    headers = {}
    for path in paths:
        try:
            headers[path] = header_of(path)
        except (OSError, ValueError) as error:
            problems.append(str(error))
    if not set(paths) - val:
        problems.append("every file is for validation, none for training")
    if problems:
        raise ValueError("nothing was imported:\n  " + "\n  ".join(problems))
    rows, sources = {"train": [], "val": []}, []
    bar = Progress(sum(path.stat().st_size for path in paths), progress)
    with new_folder(out_dir) as folder:
        for path in paths:
            sha256, documents, beyond = scan(path, headers[path], vocab_size, tokenizer["eot"], bar)
            if beyond:
                raise ValueError(f"{path}: {beyond}; name the tokenizer it was made with, or give "
                                 "--tokenizer none --vocab-size N")
            split = "val" if path in val else "train"
            name, tokens = f"{split}-{len(rows[split]):05d}.bin", (path.stat().st_size - headers[path]) // 2
            link(path, folder / name)
            rows[split].append(shard_row(name, tokens, headers[path], sha256))
            sources.append({"name": path.name, "revision": "", "documents": documents, "tokens": tokens})
        bar.end()
        if tokenizer["eot"] >= 0 and not any(source["documents"] for source in sources):
            print(f"note: no end-of-text id ({tokenizer['eot']}) was found; are these ids of {tokenizer['name']}? "
                  "Else give --tokenizer", file=sys.stderr)
        return write_manifest(folder, tokenizer, vocab_size, rows["train"], rows["val"], sources)


def link(path, name):
    try:
        os.link(path, name)
    except OSError:  # on another file system, or one without hard links
        os.symlink(path, name)


# -- the command line


def report(text, names):
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    print(f"{text}: {', '.join(sorted(names)[:5])}{more}", file=sys.stderr)


def print_summary(data_dir, manifest):
    documents = sum(row["documents"] for row in manifest["sources"])
    tokenizer = manifest["tokenizer"]["name"] or "none"
    print(f"{data_dir}\n  documents {documents:>14,}")
    for split in ("train", "val"):
        tokens = sum(shard["tokens"] for shard in manifest[split])
        print(f"  {split:9} {tokens:>14,} tokens in {len(manifest[split]):,} shard(s)")
    print(f"  tokenizer {tokenizer:>14}, {manifest['vocab_size']:,} ids")
    print(f"  data fingerprint {fingerprint(manifest)}")


def build_command(args):
    if args.tokenizer == "none":
        raise ValueError("build turns text into ids and needs a tokenizer: bytes, gpt2 or another of tiktoken")
    tokenizer = load_tokenizer(named_tokenizer(args.tokenizer))
    sources, binary = find_sources(args.inputs)
    if binary:
        report(f"left out as binary ({len(binary):,})", binary)
    manifest = build_data(args.out, sources, tokenizer, args.document_separator, args.val_ratio,
                          args.shard_tokens, args.workers)
    print_summary(args.out, manifest)


def stdlib_command(args):
    print_summary(args.out, build_stdlib(args.out))


def import_command(args):
    if args.vocab_size and args.tokenizer != "none":
        raise ValueError(f"--vocab-size goes with --tokenizer none; {args.tokenizer} has a size of its own")
    if args.tokenizer == "gpt2":  # known without its vocabulary, which may be out of reach
        identity, vocab_size = GPT2, 50257
    else:
        tokenizer = load_tokenizer(named_tokenizer(args.tokenizer), args.vocab_size)
        identity, vocab_size = tokenizer.identity, tokenizer.vocab_size
    print_summary(args.out, import_tokens(args.out, args.files, args.val, identity, vocab_size))


def verify_command(args):
    manifest, problems = verify(args.dir)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(f"{args.dir} is damaged: {len(problems):,} problem(s) above", file=sys.stderr)
        return 1
    print_summary(args.dir, manifest)
    print("  every shard is what the manifest says")


def parse(words):
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    build = commands.add_parser("build", help="files and folders of text to a data folder")
    build.add_argument("inputs", nargs="+", metavar="INPUT", help="text file, or folder to search for them")
    build.add_argument("--tokenizer", default="bytes", metavar="NAME",
                       help="bytes (default), or tiktoken's gpt2, r50k_base or p50k_base")
    build.add_argument("--document-separator", default="", metavar="TEXT",
                       help="what stands between the documents of a file; without it a file is one document")
    build.add_argument("--val-ratio", type=float, default=0.01, metavar="R",
                       help="share of the documents for validation (default 0.01)")
    build.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N",
                       help="tokens in a shard (default 100,000,000)")
    build.add_argument("--workers", type=int, default=os.cpu_count(), metavar="N",
                       help="processes (default: one per core)")

    stdlib = commands.add_parser("stdlib", help="the Python standard library's own sources, as bytes")

    imports = commands.add_parser("import", help="links to nanoGPT's or llm.c's token files")
    imports.add_argument("files", nargs="+", metavar="FILE", help="validation if 'val' is a word in its name")
    imports.add_argument("--val", nargs="+", default=[], metavar="FILE", help="validation whatever its name")
    imports.add_argument("--tokenizer", default="gpt2", metavar="NAME",
                         help="what made the ids: gpt2 (default), bytes, another of tiktoken's, or none")
    imports.add_argument("--vocab-size", type=int, default=0, metavar="N", help="with --tokenizer none")

    verifies = commands.add_parser("verify", help="read every shard; exit 0 if whole, 1 if damaged")
    verifies.add_argument("dir", metavar="DIR")
    verifies.set_defaults(run=verify_command)

    for command, run in ((build, build_command), (stdlib, stdlib_command), (imports, import_command)):
        command.add_argument("--out", required=True, metavar="DIR", help="the data folder to make")
        command.set_defaults(run=run)
    return parser.parse_args(words)


def main(words=None):
    args = parse(words)
    try:
        return args.run(args) or 0
    except (ValueError, OSError) as error:
        problem = str(error)
    except concurrent.futures.BrokenExecutor:
        problem = "a worker died, perhaps for want of memory; fewer --workers need less"
    except KeyboardInterrupt:
        problem = "interrupted, nothing was written"
    print(f"prepare.py: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
