"""A build: text through the tokenizer into a new data folder, on every core, and on from where it was killed.

A build of data/mine is under way in the folder data/.mine.building, which becomes data/mine at the end: that appears
whole or not at all. There, journal.json says every few seconds how much of the input is in the shards. The same
command goes on from it, after a kill too, to the same bytes, for the ids of a piece depend on that piece alone.
"""

import concurrent.futures
import contextlib
import copy
import fcntl
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data import sources as reading
from data.download import Ahead
from data.shards import ID, fsync_folder, read_manifest, shard_row, write_file, write_json, write_manifest
from data.sources import BLANK, DUPLICATE, Extremes, File, Piece, Seen, Source, read_pieces, without_duplicates
from data.vocabulary import LARGEST_VOCAB, load_tokenizer

SAVE_S = 10.0  # seconds of work that a kill may cost
NAMED = 10  # malformed records that are named; more are counted


class Options(NamedTuple):
    """What makes the shards, besides the files and the tokenizer."""
    val_ratio: float = 0.01
    shard_tokens: int = 100_000_000
    dedup: bool = False
    part: tuple = (1, 1)
    val_below: int = -1  # the split of another data folder in the place of val_ratio
    part_of: str = ""  # sha256 of what was divided into parts and how it is read; '': all of it is built


# -- the folder under way


@contextlib.contextmanager
def under_way(out_dir, plan):
    """Yields the folder of a build and its journal, {} at the start; the folder's data become out_dir where the body
    ends well. Where it does not, the folder stays if there is something to go on from.
    """
    folder, out_dir = building_folder(out_dir), Path(out_dir).absolute()
    refuse_full(out_dir, folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        try:
            yield folder, load_journal(folder, plan)
            fsync_folder(folder / "data")
            os.rename(folder / "data", out_dir)  # fails where out_dir has been filled meanwhile
            fsync_folder(out_dir.parent)
            shutil.rmtree(folder)
        finally:
            if (folder / "journal.json").exists() or (folder / "raw").exists():
                print(f"what is done is kept in {folder}; the same command goes on from there", file=sys.stderr)
            else:
                shutil.rmtree(folder, ignore_errors=True)


def building_folder(out_dir):
    out_dir = Path(out_dir).absolute()
    return out_dir.parent / f".{out_dir.name}.building"


def refuse_full(out_dir, folder):
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        if folder.exists() and not (folder / "data").exists():  # killed after all was done
            shutil.rmtree(folder)
        raise ValueError(f"{out_dir} exists and is not an empty folder; name another, or remove it first")


@contextlib.contextmanager
def locked(folder):
    """Holds the folder for this process. Raises ValueError where another one holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is at work in {folder}") from None
        yield
    finally:
        os.close(descriptor)


def load_journal(folder, plan):
    """The journal of a build of this plan, {} where there is none. Raises ValueError where it is of another one."""
    try:
        journal = json.loads((folder / "journal.json").read_text())
        if not (folder / "data").is_dir():  # killed after all was done, and that was moved away since
            raise FileNotFoundError
    except FileNotFoundError:
        (folder / "journal.json").unlink(missing_ok=True)
        shutil.rmtree(folder / "data", ignore_errors=True)
        (folder / "data").mkdir()
        return {}
    plan = json.loads(json.dumps(plan))  # tuples as lists, as they were written
    begun = journal["plan"]
    if differ := sorted(key for key in plan.keys() | begun.keys() if plan.get(key) != begun.get(key)):
        raise ValueError(f"a build with other {', '.join(differ)} is half done in {folder}; repeat its command to go "
                         "on with it, or remove that folder to start over" + OTHER_PARTS * ("part_of" in differ))
    return journal


OTHER_PARTS = (". All parts must divide the same files, and they have changed; for a dataset on the Hub, name the "
               "commit: hf:owner/name@COMMIT")


def pinned(folder, journal, sources):
    """The sources as a build found them when it began, so that it ends as it would have without a break: what came
    since is left out, what is read from now on is taken as it is.

    Raises ValueError where a file of which a part is in the shards is another one now, or one to come is gone.
    """
    if not journal:
        write_json(folder / "listing.json", sources)
        return [source._replace(files=list(source.files)) for source in sources]
    begun = [Source(name, revision, [File(*file) for file in files], asked)
             for name, revision, files, asked in json.loads((folder / "listing.json").read_text())]
    now = {file.name: file for source in sources for file in source.files}
    listed, read = [file for source in begun for file in source.files], journal["place"][0] + (journal["place"][1] > 0)
    for number, file in enumerate(listed):
        if file.name.startswith("hf:") or file.name in now and (number >= read or now[file.name] == file):
            continue
        what = "is in the half-done shards and has changed or gone since" if number < read else (
            "was there when the build began, and is gone or binary now")
        raise ValueError(f"{file.name} {what}; put it back as it was, or remove {folder} to start over")
    known = {file.name for file in listed}
    if new := [name for name in now if name not in known and not name.startswith("hf:")]:
        report(f"left out, for the build had begun when they came ({len(new):,})", new)
    return begun


class ShardWriter:
    """Writes the token stream of a split as files of shard_tokens tokens each, the last one shorter.

    It goes on after the completed files of `rows` and the first `tokens` tokens of the next one.
    """

    def __init__(self, folder, split, shard_tokens, rows=(), tokens=0):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.rows, self.file, self.tokens = list(rows), None, 0
        if tokens:
            self.reopen(tokens)

    def begin(self, mode):
        self.name = f"{self.split}-{len(self.rows):05d}.bin"
        self.file = open(self.folder / self.name, mode)
        self.tokens, self.sha256 = 0, hashlib.sha256()

    def reopen(self, tokens):
        self.begin("r+b")
        left = 2 * tokens
        while left and (block := self.file.read(min(left, 1 << 20))):
            self.sha256.update(block)
            left -= len(block)
        if left:
            raise ValueError(f"{self.file.name} is shorter than its journal says; remove {self.folder.parent} and "
                             "start over")
        self.file.truncate(2 * tokens)
        self.tokens = tokens

    def write(self, ids):
        while len(ids):
            if self.file is None:
                self.begin("wb")
            part = ids[:self.shard_tokens - self.tokens]
            ids = ids[len(part):]
            self.file.write(part.data)
            self.sha256.update(part.data)
            self.tokens += len(part)
            if self.tokens == self.shard_tokens:
                self.finish()

    def state(self):
        """What a later writer goes on from, after it is safe on the disk."""
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())
        return [self.rows, self.tokens]

    def finish(self):
        """Completes the file under way and returns the rows of all files."""
        if self.file is not None:
            self.state()
            self.file.close()
            self.rows.append(shard_row(self.name, self.tokens, 0, self.sha256.hexdigest()))
            self.file, self.tokens = None, 0
        return self.rows


class Progress:
    """How far a command is, on stderr: a line that moves on a terminal, a new line every 30 s elsewhere."""

    def __init__(self, total_bytes, shown, begun_at=0):
        self.total, self.shown, self.begun_at, self.position = total_bytes, shown, begun_at, begun_at
        self.done, self.tokens = 0, 0  # in this session
        self.terminal, self.one = sys.stderr.isatty(), threading.Lock()
        self.started = self.printed = time.monotonic()

    def add(self, size, tokens, position=None):
        """Counts bytes of text and tokens; position is how many of total_bytes are behind, where these are others."""
        with self.one:  # verify counts from several threads
            self.done, self.tokens = self.done + size, self.tokens + tokens
            self.position = self.begun_at + self.done if position is None else position
            now = time.monotonic()
            if self.shown and now - self.printed >= (0.2 if self.terminal else 30):
                self.printed = now
                line = self.line(now - self.started)
                print(f"\r{line}\033[K" if self.terminal else f"{line}\n", end="", file=sys.stderr, flush=True)

    def line(self, seconds):
        rates = (f"{self.done / 1e6:,.0f} MB of text, {self.done / 1e6 / seconds:,.1f} MB/s, "
                 f"{self.tokens:,} tokens, {self.tokens / seconds:,.0f} tokens/s")
        share = min(self.position / self.total, 1) if self.total else 0
        if self.position <= self.begun_at or not self.total:  # nothing to judge the rest by
            return rates
        left = seconds * max(self.total - self.position, 0) / (self.position - self.begun_at)
        left = f"{left // 3600:.0f}:{left // 60 % 60:02.0f}:{left % 60:02.0f}"
        return f"{share:4.0%} [{'#' * int(20 * share):20}] {rates}, {left} left"

    def end(self):
        if self.shown and self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# -- encoding, here or in workers


class Encoded(NamedTuple):
    """What became of neighbouring pieces of one source and split."""
    source: int
    split: str
    ids: np.ndarray  # uint16
    documents: int
    size: int  # bytes of text
    not_utf8: set  # files


class Batch(NamedTuple):
    """What became of neighbouring pieces."""
    encoded: list
    notes: list  # the pieces that are none
    keys: list  # of the documents that end in it
    last: Piece  # without its text


def piece_ids(tokenizer, piece):
    """The uint16 ids of a piece, eot included; refuses an id that the vocabulary or uint16 cannot hold."""
    ids = (tokenizer.encode_bytes if piece.starts else tokenizer.later_ids)(piece.data)
    held = min(tokenizer.vocab_size, LARGEST_VOCAB)
    if int(ids.max(initial=0)) >= held:
        raise ValueError(f"{piece.file}: the tokenizer made id {ids.max():,}; with its vocabulary of "
                         f"{tokenizer.vocab_size:,}, shards hold ids below {held:,}")
    return np.append(ids.astype(ID), np.array([tokenizer.eot] * piece.ends, ID))


def is_utf8(data):
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def encode_batch(tokenizer, pieces):
    encoded, text = [], [piece for piece in pieces if not piece.note]
    for (source, split), run in itertools.groupby(text, key=lambda piece: (piece.source, piece.split)):
        run = list(run)
        encoded.append(Encoded(source, split,
                               ids=np.concatenate([piece_ids(tokenizer, piece) for piece in run]),
                               documents=sum(piece.ends for piece in run),
                               size=sum(len(piece.data) for piece in run),
                               not_utf8={piece.file for piece in run if not is_utf8(piece.data)}))
    return Batch(encoded, [piece for piece in pieces if piece.note], [piece.key for piece in pieces if piece.key >= 0],
                 pieces[-1]._replace(data=b""))


def batches(pieces):
    """Lists of pieces that hold CHUNK bytes or a little more, so that a task is worth its way to a worker."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.data) + 100  # a piece without text is work too
        if size >= reading.CHUNK:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def start_worker(identity, file):
    global worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to answer
    threading.Thread(target=exit_with_parent, daemon=True).start()
    worker_tokenizer = load_tokenizer(identity, file=file)


def exit_with_parent():
    """Ends a worker whose parent was killed, which would wait for ever for its next task."""
    multiprocessing.parent_process().join()
    os._exit(1)


def encode_in_worker(pieces):
    return encode_batch(worker_tokenizer, pieces)


def encode_all(pieces, tokenizer, workers):
    """Yields a Batch for the pieces in their order; few batches are in memory at a time."""
    if workers == 1:
        for batch in batches(pieces):
            yield encode_batch(tokenizer, batch)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, spawn, start_worker, (tokenizer.identity, tokenizer.file))
    try:
        waiting = deque()
        for batch in batches(pieces):
            waiting.append(pool.submit(encode_in_worker, batch))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


# -- building


def build_data(out_dir, sources, tokenizer, how=reading.Reading(), options=Options(), workers=1, keep_raw=False,
               progress=True):
    """Encodes the sources into a new data folder and returns its manifest; goes on with a build that was killed."""
    check_options(options, workers)
    check_divisible(sources, how, options)
    files = [file for source in sources for file in source.files]
    plan = {"inputs": [[source.asked] if source.asked else [source.name, source.revision] for source in sources],
            "tokenizer": tokenizer.identity,
            "reading": [how.separator.decode(), how.column, how.stdin_format], "chunk": reading.CHUNK,
            **options._asdict()}
    # as many as there is work for, and none where encoding costs less than the way to a worker
    most = workers if is_stdin(sources) else sum(file.size for file in files) // reading.CHUNK + 1
    workers = 1 if tokenizer.identity["kind"] == "bytes" else min(workers, most)
    if manifest := already_built(out_dir, plan, sources):
        return manifest
    with under_way(out_dir, plan) as (folder, journal):
        sources = pinned(folder, journal, sources)
        names = [file.name for source in sources for file in source.files if file.name.startswith("hf:")]
        fetch = Ahead(names, "" if keep_raw else folder / "raw")
        how = how._replace(fetch=functools.partial(on_this_disk, fetch=fetch))
        if tokenizer.file:
            write_file(folder / "data" / "tokenizer.json", Path(tokenizer.file).read_bytes())
            tokenizer = copy.copy(tokenizer)
            tokenizer.file = str(folder / "data" / "tokenizer.json")  # the workers', whatever comes to the other
        limit = int(options.val_ratio * 2**64) if options.val_below < 0 else options.val_below
        journal = journal or new_journal(plan, sources, limit)
        shards = encode_into(folder, journal, sources, tokenizer, how, workers, progress)
        limit = better_limit(journal, shards, options)
        if limit != journal["limit"]:  # a corpus so small that a side was empty
            check_repeatable(sources)
            clear(folder)
            journal = new_journal(plan, sources, limit)
            shards = encode_into(folder, journal, sources, tokenizer, how, workers, progress)
        say_what_was_left_out(journal, tokenizer)
        return write_manifest(folder / "data", tokenizer.identity, tokenizer.vocab_size, shards["train"],
                              shards["val"], journal["sources"], **split_of(journal, options),
                              build=build_digest(plan, sources))


def build_digest(plan, sources):
    """sha256 of a build's command and of the names and sizes of the files it reads."""
    listed = [[file.name, file.size] for source in sources for file in source.files]
    return hashlib.sha256(json.dumps([plan, listed]).encode()).hexdigest()


def already_built(out_dir, plan, sources):
    """The manifest in out_dir, where this very command has made it: it may have been killed after all was done."""
    known = os.path.exists(os.path.join(out_dir, "manifest.json")) and read_manifest(out_dir)
    if not known or known.get("build") != build_digest(plan, sources) or is_stdin(sources):
        return None
    shutil.rmtree(building_folder(out_dir), ignore_errors=True)
    print(f"{out_dir} has been built already by this command from files of the same names and sizes", file=sys.stderr)
    return known


def is_stdin(sources):
    return any(file.name == "-" for source in sources for file in source.files)


def on_this_disk(name, fetch):
    return fetch(name) if name.startswith("hf:") else contextlib.nullcontext(name)


def check_options(options, workers):
    if not 0 <= options.val_ratio < 1 or options.shard_tokens < 1 or workers < 1:
        raise ValueError("wanted are 0 <= --val-ratio < 1, --shard-tokens >= 1 and --workers >= 1, "
                         f"got {options.val_ratio}, {options.shard_tokens} and {workers}")


def check_divisible(sources, how, options):
    """Says of a single text file before hours of work what better_limit would say after them."""
    files = [file for source in sources for file in source.files]
    alone = len(files) == 1 and files[0].size > reading.CHUNK and reading.kind_of(files[0].name) == "text"
    if alone and not how.separator and options.val_ratio and options.val_below < 0 and options.part == (1, 1):
        raise not_divisible("one document")


def not_divisible(found):
    return ValueError(f"validation is split by document, and the input holds {found}. With --val-ratio 0 there is no "
                      "validation, with --document-separator TEXT a text file has many documents")


def new_journal(plan, sources, limit):
    rows = [{"name": source.name, "revision": source.revision, "documents": 0, "tokens": 0} for source in sources]
    return {"plan": plan, "limit": limit, "place": [0, 0], "crc": 0, "read": 0, "lowest": 2**64, "highest": -1,
            "shards": {"train": [[], 0], "val": [[], 0]}, "sources": rows, "keys": 0, "malformed": [],
            "not_utf8": []}


def clear(folder):
    (folder / "journal.json").unlink(missing_ok=True)
    for path in (folder / "data").glob("*.bin"):
        path.unlink()


def encode_into(folder, journal, sources, tokenizer, how, workers, progress):
    """Encodes what the journal says is left, and returns the rows of the shards by split."""
    plan = journal["plan"]
    writers = {split: ShardWriter(folder / "data", split, plan["shard_tokens"], *state)
               for split, state in journal["shards"].items()}
    extremes = Extremes(journal["lowest"], journal["highest"])
    pieces = read_pieces(sources, how, journal["limit"], extremes, journal["place"], journal["crc"])
    before = [0, *itertools.accumulate(file.size for source in sources for file in source.files)]
    bar = Progress(before[-1], progress, before[journal["place"][0]] + journal["read"])
    saved, listed = time.monotonic(), [list(source.files) for source in sources]
    with key_file(folder, journal["keys"]) as keys:
        if plan["dedup"]:
            pieces = without_duplicates(pieces, Seen(np.fromfile(keys.name, np.uint64)))
        for batch in encode_all(pieces, tokenizer, workers):
            take(batch, journal, writers, keys)
            size, tokens = sum(part.size for part in batch.encoded), sum(len(part.ids) for part in batch.encoded)
            bar.add(size, tokens, before[journal["place"][0]] + journal["read"])
            # with --dedup a document is judged whole, so its middle is no place to go on from
            if time.monotonic() - saved >= SAVE_S and (batch.last.ends or not plan["dedup"]):
                listed = save_listing(folder, sources, listed)
                save(folder, journal, writers, keys, extremes)
                saved = time.monotonic()
        if (folder / "journal.json").exists():
            save(folder, journal, writers, keys, extremes)  # all is done but for the manifest
    bar.end()
    journal |= {"lowest": extremes.lowest, "highest": extremes.highest}
    return {split: writer.finish() for split, writer in writers.items()}


@contextlib.contextmanager
def key_file(folder, count):
    """The file of the hashes of all documents, cut to the first `count`, to append to."""
    with open(folder / "keys.bin", "ab") as file:
        file.truncate(8 * count)
        yield file


def take(batch, journal, writers, keys):
    """Writes what became of some pieces, and notes it in the journal."""
    for part in batch.encoded:
        writers[part.split].write(part.ids)
        row = journal["sources"][part.source]
        row["documents"] += part.documents
        row["tokens"] += len(part.ids)
        if part.split == "val":  # counted apart too: an append takes the others alone
            row["val_documents"] = row.get("val_documents", 0) + part.documents
            row["val_tokens"] = row.get("val_tokens", 0) + len(part.ids)
        if part.not_utf8:
            journal["not_utf8"] = sorted({*journal["not_utf8"], *part.not_utf8})
    for piece in batch.notes:
        kind = {BLANK: "blank", DUPLICATE: "duplicates"}.get(piece.note, "malformed")
        row = journal["sources"][piece.source]
        row[kind] = row.get(kind, 0) + 1
        if kind == "malformed" and len(journal["malformed"]) < NAMED:
            journal["malformed"].append(f"{piece.file} {piece.note}")
    keys.write(np.array(batch.keys, np.uint64).tobytes())
    last = batch.last
    journal |= {"place": list(last.place), "crc": last.crc, "read": last.read,
                "keys": journal["keys"] + len(batch.keys)}


def save_listing(folder, sources, listed):
    """Writes the files again where some were found otherwise than `listed` when they were opened."""
    found = [list(source.files) for source in sources]
    if found != listed:
        write_json(folder / "listing.json", sources)
    return found


def save(folder, journal, writers, keys, extremes):
    """Makes sure that a later session can go on from here."""
    keys.flush()
    os.fsync(keys.fileno())
    shards = {split: writer.state() for split, writer in writers.items()}
    fsync_folder(folder / "data")
    write_json(folder / "journal.json",
               journal | {"shards": shards, "lowest": extremes.lowest, "highest": extremes.highest})


def count(journal, kind):
    return sum(row.get(kind, 0) for row in journal["sources"])


def better_limit(journal, shards, options):
    """The document hash below which a document belongs to val (0: no val): the journal's, unless a side is empty.

    Raises ValueError where there is no text, or where there are not two documents to part.
    """
    documents = count(journal, "documents")
    if documents == 0 and options.part == (1, 1):
        raise ValueError("there is no text in " + ", ".join(row["name"] for row in journal["sources"]))
    if options.part != (1, 1) or options.val_below >= 0:  # other folders have the other documents
        return journal["limit"]
    if options.val_ratio and journal["lowest"] == journal["highest"]:
        raise not_divisible("one document" if documents == 1 else f"{documents:,} documents that begin with the same "
                            "text")
    if options.val_ratio and not shards["val"]:
        return journal["lowest"] + 1
    return journal["highest"] if not shards["train"] else journal["limit"]


def check_repeatable(sources):
    if is_stdin(sources):
        raise ValueError("of so few documents none is for validation, or all are, and standard input cannot be read "
                         "twice; give another --val-ratio (0: no validation), or a file")


def say_what_was_left_out(journal, tokenizer):
    for line in journal["malformed"]:
        print(f"left out: {line}", file=sys.stderr)
    if malformed := count(journal, "malformed"):
        print(f"left out: {malformed:,} malformed record(s), the first {len(journal['malformed'])} named above",
              file=sys.stderr)
    for kind, text in (("blank", "records without text"), ("duplicates", "duplicates of a document before them")):
        if found := count(journal, kind):
            print(f"left out: {found:,} {text}", file=sys.stderr)
    if journal["not_utf8"] and tokenizer.identity["kind"] != "bytes":
        report("not UTF-8, bytes that fail became U+FFFD", journal["not_utf8"])


def report(text, names):
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    print(f"{text}: {', '.join(sorted(names)[:5])}{more}", file=sys.stderr)


def sample_texts(sources, how, most_bytes, val_ratio, raw):
    """Texts of about most_bytes of the files: the documents of the highest hashes, so that the order of the files
    does not choose, and none that a build with this val_ratio takes for validation. Files of the Hub lie in the folder
    `raw` while they are read."""
    share = most_bytes / max(sum(file.size for source in sources for file in source.files), 1)
    limit = int(max(1 - share, val_ratio) * 2**64)  # what is above it counts as 'train'
    names = [file.name for source in sources for file in source.files if file.name.startswith("hf:")]
    how = how._replace(fetch=functools.partial(on_this_disk, fetch=Ahead(names, raw)))
    for piece in read_pieces(sources, how, limit, Extremes()):
        if piece.split == "train" and not piece.note:
            yield piece.data.decode("utf-8", "replace")


def split_of(journal, options):
    """What the manifest says of the split: which documents were for validation, and which part this is."""
    split = {"split": {"val_below": journal["limit"], "dedup": options.dedup}}
    return split if options.part == (1, 1) else split | {"part": list(options.part), "part_of": options.part_of}
