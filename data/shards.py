"""The data folder: its manifest, what is wrong with it, and the tokens of its shards as the trainer reads them.

The manifest, manifest.json, is an object with these keys; a run's data fingerprint is of those marked *:

format      1
dtype *     "uint16": of the ids, little-endian
vocab_size *
            ids are below it
tokenizer * {"kind": "bytes", "tiktoken", "tokenizer.json" (which lies beside it) or "none", "name", "sha256", "eot"}
train *, val *
            shards in the order of the stream: {"file", "tokens", "bytes", "header_bytes": 0 or 1024, "sha256"}
sources     where they come from, not read by a run: {"name", "revision" (a commit on the Hub, else ''), "documents",
            "tokens"}, both with those for validation; and where there are any "val_documents" and "val_tokens", which
            are for validation, "malformed", "blank" and "duplicates", records that were left out
split       of a build: {"val_below": documents whose hash is below it are for validation, "dedup": whether duplicates
            were dropped}
build       of a build: sha256 of its command and of the names and sizes of its files
part        [i, n] of a build of the i-th of n parts of its files, until they are merged; part_of: sha256 of their list
mixture *   of `mix`: {"seed": of the order of the sources, "tokens": that count as a pass, "sources", in the order of
            the lists above: [{"name", "share": a whole number, "folder" (not in the fingerprint), "fingerprint": of its
            data, "train_shards", "tokens", "val_shards", "val_tokens": how much of these lists is its}]}
"""

import bisect
import contextlib
import fractions
import hashlib
import itertools
import json
import math
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.vocabulary import LARGEST_VOCAB

FORMAT = 1
ID = np.dtype("<u2")  # a token id on disk
LLMC_HEADER = 1024  # bytes before the ids in llm.c's files
OPEN_SHARDS = 128  # file descriptors held by a stream
HASH_BYTES_PER_S = 200e6
SLOW_READ_S = 0.2  # of the windows of many steps
LEAST_SHARE = fractions.Fraction(1, 1000)  # of a source in a mixture: some windows of each block of 10,000


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
    if "mixture" in manifest:
        seen["mixture"] = placeless(manifest["mixture"])
    return hashlib.sha256(json.dumps(seen, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def placeless(mixture):
    """A manifest's mixture without the places of its sources."""
    return mixture | {"sources": [{key: value for key, value in source.items() if key != "folder"}
                                  for source in mixture["sources"]]}


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
    if manifest.get("train") == [] and "part" not in manifest:  # a part of few files may have none
        problems.append("train lists no shard")
    if "mixture" in manifest and not problems:
        problems += mixture_problems(manifest)
    times = Counter(shard["file"] for shard in all_shards(manifest) if has_fields(shard, {"file": str}))
    problems += [f"{name} is listed {n} times" for name, n in times.items() if n > 1]
    return [f"manifest.json: {problem}" for problem in problems]


def mixture_problems(manifest):
    """What is wrong with the mixture in a manifest: its sources must account for all shards."""
    mixture, problems = manifest["mixture"], []
    fields = {"name": str, "share": int, "train_shards": int, "tokens": int, "val_shards": int, "val_tokens": int}
    sources = mixture.get("sources") if has_fields(mixture, {"seed": int, "tokens": int, "sources": list}) else None
    if not sources or not all(has_fields(source, fields) for source in sources):
        return [f"mixture is {mixture!r}, not an object with seed, tokens and sources, each with {', '.join(fields)}"]
    for split, shards, tokens in (("train", "train_shards", "tokens"), ("val", "val_shards", "val_tokens")):
        rows = iter(manifest[split])
        for source in sources:
            found = sum(row.get("tokens", 0) for row in itertools.islice(rows, source[shards]))
            if found != source[tokens]:
                problems.append(f"mixture: source {source['name']} has {source[tokens]:,} tokens in {source[shards]} "
                                f"{split} shards, the list of shards {found:,}")
        if left := len(list(rows)):
            problems.append(f"mixture: {left} {split} shards belong to none of its sources")
    least = sum(source["share"] for source in sources) * LEAST_SHARE
    problems += [f"mixture: the share of {source['name']} is below {float(LEAST_SHARE)}" for source in sources
                 if source["share"] < least]
    return problems


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
    manifest = read_manifest(data_dir)
    present = grown(recorded, manifest["train"])
    return None if "mixture" in manifest else present


def check_fingerprint(manifest, recorded, data_dir):
    """Raises ValueError where the data are not those whose fingerprint is recorded."""
    if (found := fingerprint(manifest)) != recorded:
        raise ValueError(f"the data in {data_dir} are not those of this run: vocabulary, tokenizer, validation "
                         f"shards or mixture differ (fingerprint {recorded[:12]} was recorded, found {found[:12]})")


class Part(NamedTuple):
    """A source's part of a stream of tokens."""
    name: str
    share: float  # of a mixture; a whole number in train, in val one of 1
    first_token: int
    tokens: int


class Mixture(NamedTuple):
    """Several sources in one stream of train tokens."""
    seed: int
    sources: tuple

    def windows_before(self, window):
        """How many of the first `window` windows of a job are of each source (int64): shares rounded to less than one,
        that add up."""
        ends = [0, *itertools.accumulate(source.share for source in self.sources)]
        return np.diff([window * end // ends[-1] for end in ends])


def parts_of(mixture, shares, tokens):
    """A Part for each source of a manifest's mixture; `tokens` names what counts them."""
    ends = itertools.accumulate((source[tokens] for source in mixture["sources"]), initial=0)
    return tuple(Part(source["name"], share, first, source[tokens])
                 for source, share, first in zip(mixture["sources"], shares, ends))


def first_segments(manifest):
    """trainer.json's segments as a run begins; that of a mixture holds it too, and stays the only one."""
    return [[0, manifest["train"], *([manifest["mixture"]] if "mixture" in manifest else [])]]


def mixed_order(mixture):
    """The order of windows of a mixture: ((0, tokens that count as a pass, Mixture),)."""
    shares = [source["share"] for source in mixture["sources"]]
    return ((0, mixture["tokens"], Mixture(mixture["seed"], parts_of(mixture, shares, "tokens"))),)


def val_sources(manifest, block_size):
    """A Part of the validation tokens for each source of a mixture, with shares of 1 over those that fill a window;
    of other data one without a name."""
    if "mixture" not in manifest:
        return (Part("", 1.0, 0, sum(shard["tokens"] for shard in manifest["val"])),)
    shares = [source["share"] * (source["val_tokens"] > block_size) for source in manifest["mixture"]["sources"]]
    return parts_of(manifest["mixture"], [share / max(sum(shares), 1) for share in shares], "val_tokens")


def windows_of(sources, starts):
    """[(source, whether each of the windows at `starts` is of it)] for those that have any."""
    masks = [(starts >= source.first_token) & (starts < source.first_token + source.tokens) for source in sources]
    return [(source, mask) for source, mask in zip(sources, masks) if mask.any()]


def losses_by_source(sources, starts, loss, block_size):
    """{'sources': {name: mean loss per token, None if not finite}} of a mixture, from the sums of windows; else {}."""
    means = {source.name: sum(itertools.compress(loss, mask)) / (np.count_nonzero(mask) * block_size)
             for source, mask in windows_of(sources, starts) if source.name}
    return {"sources": {name: mean if math.isfinite(mean) else None for name, mean in means.items()}} if means else {}


def by_share(sources, starts, sums):
    """The sums of windows, weighted as if each source had its share of the windows."""
    weights = np.zeros(len(starts))
    for source, mask in windows_of(sources, starts):
        weights[mask] = source.share * len(starts) / np.count_nonzero(mask)
    return (weights * np.array(sums)).tolist()


class Tokens:
    """The tokens of a list of shards as one stream. They are read, not mapped: a file that is cut off under a map ends
    the process with a bus error, and what a map has read counts as memory of the process."""

    def __init__(self, folder, shards, vocab_size, stamps=()):
        self.folder, self.shards, self.vocab_size = folder, shards, vocab_size
        self.starts = [0]
        for shard in shards:
            self.starts.append(self.starts[-1] + shard["tokens"])
        self.opened, self.stamps = OrderedDict(), dict(stamps)  # by number: descriptors, and files as found

    def __len__(self):
        return self.starts[-1]

    def __del__(self):
        for descriptor in self.opened.values():
            os.close(descriptor)

    def shard_at(self, token):
        return bisect.bisect_right(self.starts, token) - 1

    def path(self, number):
        return os.path.join(self.folder, self.shards[number]["file"])

    def descriptor(self, number):
        if number not in self.opened:
            try:
                opened = os.open(self.path(number), os.O_RDONLY)
            except FileNotFoundError:
                raise changed(self.path(number), "it is gone") from None
            shard, found = self.shards[number], stamp(os.fstat(opened))
            if found[1] != (size := shard["header_bytes"] + 2 * shard["tokens"]):
                os.close(opened)
                raise changed(self.path(number), f"it has {found[1]:,} bytes, its data manifest says {size:,}")
            self.opened[number] = opened
            self.stamps.setdefault(number, found)
            if len(self.opened) > OPEN_SHARDS:
                os.close(self.opened.popitem(last=False)[1])
        return self.opened[number]

    def windows(self, starts, length):
        """int64 [*starts' shape, length]: the tokens from each start on.

        Raises ValueError at an id beyond the vocabulary, and where a file is no longer what it was when it was opened.
        """
        starts, touched, filled = np.asarray(starts), set(), 0
        ids = np.empty((starts.size, length), ID)
        content = memoryview(ids.reshape(-1)).cast("B") if ids.size else b""
        for number, place, size in self.pieces(starts.ravel().tolist(), length):
            if os.preadv(self.descriptor(number), [content[filled:filled + size]], place) < size:
                raise changed(self.path(number), f"it ends before byte {place + size:,}")
            filled += size
            touched.add(number)
        for number in touched:  # after the reading: what was read before a change is whole
            check_unchanged(self.path(number), self.stamps[number])
        if len(ids) and ids.max() >= self.vocab_size:
            row, column = np.unravel_index(ids.argmax(), ids.shape)
            token = int(starts.ravel()[row]) + int(column)
            number = self.shard_at(token)
            raise ValueError(f"{self.path(number)}: token {token - self.starts[number]:,} is {ids.max()}, beyond the "
                             f"vocabulary of {self.vocab_size:,}")
        return ids.astype(np.int64).reshape(*starts.shape, length)

    def pieces(self, starts, length):
        """Where so many tokens lie from each start on: (number of the shard, place in it, size) in bytes, in order."""
        for start in starts:
            end = start + length
            while start < end:
                number = self.shard_at(start)
                taken = min(end, self.starts[number + 1]) - start
                yield number, self.shards[number]["header_bytes"] + 2 * (start - self.starts[number]), 2 * taken
                start += taken

    def ahead(self, starts, length):
        """Has the system fetch into its cache, all at once, what `windows` will be asked for next."""
        for number, place, size in self.pieces(starts, length) if hasattr(os, "posix_fadvise") else ():
            os.posix_fadvise(self.descriptor(number), place, size, os.POSIX_FADV_WILLNEED)


class StepQueue:
    """The windows of the steps to come, handed out step by step. After a step the caches are cold, and to read for many
    steps costs little more than for one: so they are read for many at once, at a start for one, then 4, then 16, up to
    most_steps or most_tokens, and the system is asked for those after them; for fewer where reading is slow, for a
    signal waits for it. `seconds` counts the time in it.

    draw(step, steps): the windows of so many steps as drawn, [3 or 4, steps, windows of a step], first tokens third;
    `own`: the slice of a step's that this rank reads; batches_of(int64 [steps, own, T + 1]): a list, of each step what
    `take` hands out."""

    def __init__(self, draw, batches_of, own, most_steps, most_tokens):
        self.draw, self.batches_of, self.own = draw, batches_of, own
        self.most_steps, self.most_tokens, self.seconds = most_steps, most_tokens, 0.0
        self.clear()

    def take(self, step, end, stream, block_size):
        """(its windows as drawn, its batches) of the step, the one after the last that was taken; `end` never comes.

        Raises: ValueError as `Tokens.windows`, for the windows of this step alone."""
        began = time.perf_counter()
        if not self.ready:
            most = self.most_tokens // max(1, block_size * (self.own.stop - self.own.start))
            self.steps = max(1, min(self.steps, self.most_steps, most, end - step))
            try:
                self._read(step, self.steps, stream, block_size)
            except ValueError:
                self.steps = 1
                self._read(step, 1, stream, block_size)
            is_slow = time.perf_counter() - began > SLOW_READ_S
            self.steps = max(1, self.steps // 4) if is_slow else 4 * self.steps
            after = step + len(self.ready)
            with contextlib.suppress(ValueError, OSError):  # advice; what is wrong there is told when it is read
                self._ask(after, max(1, min(self.steps, self.most_steps, most, end - after)), stream, block_size)
        taken = self.ready.popleft()
        self.seconds += time.perf_counter() - began
        return taken

    def _read(self, step, steps, stream, block_size):
        drawn = self.draw(step, steps)
        batches = self.batches_of(stream.windows(drawn[2][:, self.own], block_size + 1))
        self.ready.extend(zip(drawn.swapaxes(0, 1), batches))

    def _ask(self, step, steps, stream, block_size):
        stream.ahead(self.draw(step, steps)[2][:, self.own].ravel().tolist(), block_size + 1)

    def clear(self):
        """Forget what was read: the windows to come are others now."""
        self.ready, self.steps = deque(), 1


def stamp(status):
    """What tells a file from another one in its place, and from itself with another content."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def check_unchanged(path, before):
    """Raises ValueError where the file at `path` is not the one that had this stamp."""
    try:
        now = stamp(os.stat(path))
    except FileNotFoundError:
        raise changed(path, "it is gone") from None
    if now != before:
        raise changed(path, "another file is in its place" if now[0] != before[0] else
                      f"it had {before[1]:,} bytes and has {now[1]:,}" if now[1] != before[1] else
                      "it was written to")


def changed(path, what):
    return ValueError(f"{path} changed while this run reads it: {what}. The step was not done. 'prepare.py verify' "
                      "says whether the file is whole now, with --repair it is fetched again; then the run can go on")


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


# -- writing


def fsync_folder(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put(path, place):
    """Moves a file to its place at one instant; what the place was a link to stays as it is."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    os.replace(path, place)
    fsync_folder(place.parent)


def write_file(path, content):
    """Writes or replaces a file at one instant."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(content)
    put(temporary, path)


def write_json(path, value):
    write_file(path, json.dumps(value, indent=1).encode() + b"\n")


def write_manifest(folder, tokenizer, vocab_size, train, val, sources, **more):
    manifest = {"format": FORMAT, "dtype": "uint16", "vocab_size": vocab_size, "tokenizer": tokenizer,
                "train": train, "val": val, "sources": sources, **more}
    write_json(folder / "manifest.json", manifest)
    return manifest


def shard_row(name, tokens, header_bytes, sha256):
    return {"file": name, "tokens": tokens, "bytes": header_bytes + 2 * tokens, "header_bytes": header_bytes,
            "sha256": sha256}
