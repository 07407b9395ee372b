"""Documents out of files: text, JSON lines, parquet and standard input, in pieces of at most CHUNK bytes.

What a file holds is told by its name: .jsonl or .ndjson, .parquet, else text, each also as .gz or .zst but for
parquet. A text file is one document, or several with a separator between them; a record of the others is one.

What cannot be a document is not dropped in silence: it passes through as a piece with a note and is counted.
"""

import contextlib
import gzip
import hashlib
import io
import itertools
import json
import os
import sys
import tempfile
import zlib
from typing import NamedTuple

import numpy as np

CHUNK = 1 << 20  # bytes of text encoded at a time
LONGEST_LINE = 256 << 20  # bytes of a JSON record; what is longer cannot be held in memory
HELD_IN_MEMORY = 64 << 20  # bytes of a document that --dedup has not judged yet; more of it waits in a file
BLANK, DUPLICATE = "blank", "duplicate"  # the notes that are no description of a malformed record


class File(NamedTuple):
    """A file to read and what pins its content: a build goes on only while they are the same."""
    name: str
    size: int
    changed: int  # ns since 1970


class Source(NamedTuple):
    """A row of the manifest's sources and the files behind it."""
    name: str
    revision: str
    files: list
    asked: str = ""  # the words that named it on the Hub, where the same words may name other files tomorrow


class Reading(NamedTuple):
    """How files are read."""
    separator: bytes = b""  # between the documents of a text file; b'': the file is one
    column: str = "text"  # of JSON lines and parquet
    stdin_format: str = "text"  # or 'jsonl'
    fetch: object = contextlib.nullcontext  # a file's name -> a context with its path on this disk


class Chunk(NamedTuple):
    """A document, a part of a long one, or, with a note, a record that is none."""
    starts: bool
    data: bytes
    ends: bool
    note: str = ""


class Piece(NamedTuple):
    """A chunk and where it belongs."""
    source: int
    split: str
    file: str
    data: bytes
    ends: bool
    starts: bool = True
    note: str = ""
    place: tuple = (0, 0)  # (number of its file, its number in that file)
    crc: int = 0  # of the file's pieces so far
    read: int = 0  # bytes of the file read so far
    key: int = -1  # hash of a whole document that ends here, with --dedup


# -- which files


def find_sources(inputs):
    """A source per input, and the binary files left out; a file met twice is taken once."""
    paths = [given for given in inputs if given != "-"]
    if missing := [given for given in paths if not os.path.exists(given)]:
        raise ValueError("no such file or folder: " + ", ".join(missing))
    if strange := [given for given in paths if not (os.path.isfile(given) or os.path.isdir(given))]:
        raise ValueError("neither a file nor a folder: " + ", ".join(strange))
    sources, binary, seen = [], [], set()
    for given in inputs:
        files = []
        for path in walk(given) if os.path.isdir(given) else [given]:
            if (real := path if path == "-" else os.path.realpath(path)) not in seen:
                seen.add(real)
                (binary if is_binary(path) else files).append(path)
        sources.append(Source(given, "", [file_at(path) for path in files]))
    return sources, binary


def part_of(sources, number, count):
    """The sources with those files alone that are in one of `count` parts of about the same size, in their order.

    Raises ValueError for standard input, which has no parts.
    """
    total, behind, parts = sum(file.size for source in sources for file in source.files), 0, []
    for source in sources:
        files = []
        for file in source.files:
            if file.name == "-":
                raise ValueError("standard input cannot be divided; give --part with files")
            middle = behind + file.size / 2
            if min(int(count * middle / max(total, 1)), count - 1) == number - 1:  # an empty file at the end too
                files.append(file)
            behind += file.size
        parts.append(source._replace(files=files))
    return parts


def file_at(path):
    """The File of a path as it lies on the disk; of standard input nothing is known."""
    if path == "-":
        return File("-", 0, 0)
    found = os.stat(path)
    return File(str(path), found.st_size, found.st_mtime_ns)


def walk(folder, left_out=(), above=()):
    """The regular files below a folder, hidden ones apart, in an order that is the same on every machine. Links to
    folders are followed, but for one that leads back to a folder `above` it."""
    here = os.path.realpath(folder)
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name) if here not in above else ():
        if entry.name.startswith(".") or entry.name in left_out:
            continue
        if entry.is_dir():
            yield from walk(entry.path, left_out, (*above, here))
        elif entry.is_file():
            yield entry.path


def kind_of(name):
    """What a file holds by its name: 'jsonl', 'parquet' or 'text'. A packed .json is JSON lines, as datasets have it;
    one that is not packed is a text, as a folder of sources has it."""
    name = name.lower()
    bare = name.removesuffix(".gz").removesuffix(".zst")
    if bare.endswith((".jsonl", ".ndjson")) or bare != name and bare.endswith(".json"):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def is_binary(path):
    if path == "-" or kind_of(path) != "text":
        return False
    with opened(path) as (file, _):
        return b"\0" in file.read(8192)


@contextlib.contextmanager
def opened(path, name=""):
    """A file's bytes, unpacked where its name says so, and a function for how many of it were read.

    Raises ValueError where the packed bytes are damaged or end too early.
    """
    with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as raw:
        try:
            yield unpacked(raw, path.lower()), raw.tell if path != "-" else lambda: 0
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise damaged(name or path, error) from None
        except OSError as error:
            if error.errno is None and path.lower().endswith(".zst"):  # pyarrow's word for damage
                raise damaged(name or path, error) from None
            raise


def unpacked(raw, name):
    if name.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), CHUNK)
    if name.endswith(".zst"):  # by pyarrow: the package zstandard takes the half of a file for the whole
        return io.BufferedReader(pyarrow_for(name).CompressedInputStream(raw, "zstd"), CHUNK)
    return raw


def damaged(path, error):
    return ValueError(f"{path} is damaged or cut off ({error}); fetch or make it again, or leave it out")


def pyarrow_for(name):
    """The package pyarrow. Raises ValueError where it is not installed."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{name} needs the package pyarrow: pip install pyarrow") from None
    return pyarrow


# -- their documents


def read_chunks(file, separator):
    """Yields the chunks of the documents of a text file, which separator parts (b'': the file is one).

    A document over CHUNK bytes comes in several chunks, whose borders depend on that document alone; one of
    nothing but blanks is dropped: between separators there may be nothing.
    """
    data, begin, starts, more = b"", 0, True, True
    while True:
        found = data.find(separator, begin) if separator else -1
        end = found if found >= 0 else len(data)
        if found < 0 and more and end - begin <= CHUNK + len(separator):
            block = file.read(CHUNK)
            data, begin, more = data[begin:] + block, 0, bool(block)
        elif end - begin > CHUNK:
            cut = cut_point(data, begin)
            yield Chunk(starts, data[begin:cut], False)
            begin, starts = cut, False
        else:
            text = data[begin:end]
            if not starts or text.strip():
                yield Chunk(starts, text, True)
            if found < 0:
                return
            begin, starts = found + len(separator), True


# first bytes of UTF-8 characters that are no white space: that begins with ASCII, C2, E1, E2 or E3
BEGINS_WORD = frozenset([*range(0x21, 0x7F), *range(0xC3, 0xE1), *range(0xE4, 0xF5)])


def cut_point(data, begin):
    """Where the chunk that begins there ends, at most CHUNK bytes on.

    It ends before the last newline, or else space, that stands alone between words, in the last sixteenth of that where
    it can, so the ids are those of the uncut text: no vocabulary joins such a blank to what is before it. Else before
    one that a word follows: GPT-2's pattern does not join that either. Else between two characters.
    """
    limit = begin + CHUNK
    near = limit - CHUNK // 16
    for alone, first, blank in itertools.product((True, False), (near, begin + 1), (b"\n", b" ")):
        cut = data.rfind(blank, first, limit)
        while cut >= 0 and not (data[cut + 1] in BEGINS_WORD and (not alone or stands_alone(data, cut))):
            cut = data.rfind(blank, first, cut)
        if cut >= 0:
            return cut
    for cut in range(limit, max(limit - 4, begin), -1):
        if not 0x80 <= data[cut] < 0xC0:  # not inside a character
            return cut
    return limit


def stands_alone(data, cut):
    """Whether the blank there is the first of its run, and no newline after a mark, which GPT-4's pattern joins."""
    before = data[cut - 1:cut]
    return before.isalnum() or not before.isspace() and data[cut] != 0x0A


def document_chunks(data):
    """The chunks of one document, with the same borders that read_chunks gives it."""
    if not data.strip():
        yield Chunk(True, b"", True, BLANK)
        return
    begin = 0
    while len(data) - begin > CHUNK:
        cut = cut_point(data, begin)
        yield Chunk(begin == 0, data[begin:cut], False)
        begin = cut
    yield Chunk(begin == 0, data[begin:], True)


def read_json_lines(file, name, column):
    """The chunks of the text in `column` of each record. Raises ValueError where the first record lacks it."""
    known = False
    for number in itertools.count(1):
        line = file.readline(LONGEST_LINE)
        if not line:
            return
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            skip_line(file)
            yield Chunk(True, b"", True, f"line {number:,}: longer than {LONGEST_LINE >> 20:,} MiB")
        elif line.strip():
            record, note = parsed(line)
            if not note and not known and column not in record:
                raise no_column(name, column, record)
            known = known or not note
            text, note = (b"", note) if note else text_in(record, column)
            yield from [Chunk(True, b"", True, f"line {number:,}: {note}")] if note else document_chunks(text)


def skip_line(file):
    while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
        pass


def parsed(line):
    """The object in a line of JSON, and '' or why there is none."""
    try:
        record = json.loads(line)
    except RecursionError:
        return None, "nested too deep"
    except ValueError as error:  # no JSON, or no UTF-8
        return None, f"{error}"
    return (record, "") if isinstance(record, dict) else (None, f"{kind_name(record)}, not an object")


def kind_name(value):
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def text_in(record, column):
    """The text of a record as UTF-8, and '' or why there is none."""
    if column not in record:
        return b"", f"no {column!r} in it"
    if not isinstance(record[column], str):
        return b"", f"{column!r} is {kind_name(record[column])}, not a text"
    try:
        return record[column].encode(), ""
    except UnicodeEncodeError:
        return b"", f"{column!r} holds half of a surrogate pair, which is no character"


def no_column(name, column, columns):
    there = ", ".join(map(str, list(columns)[:30])) or "none"
    return ValueError(f"{name} has no column {column!r}; there are: {there}. --text-column names another")


def read_parquet(path, name, column):
    """Yields (chunk, bytes of the file read) for the text in `column` of each row; no other column is read."""
    pyarrow = pyarrow_for(name)
    try:
        with pyarrow.parquet.ParquetFile(path, page_checksum_verification=True) as table:
            kind = text_type(name, column, table.schema_arrow, pyarrow.types)
            size, rows = os.path.getsize(path), table.metadata.num_rows
            for number, text in enumerate(parquet_texts(table, column, kind, pyarrow), 1):
                note = f"row {number:,}: {column!r} is null, not a text"
                chunks = [Chunk(True, b"", True, note)] if text is None else document_chunks(text)
                yield from ((chunk, size * number // rows) for chunk in chunks)
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None):  # of the disk; pyarrow's word for damage has none
            raise
        raise damaged(name, error) from None


def text_type(name, column, schema, types):
    """The type of the column's texts. Raises ValueError where it is not there or holds something else."""
    if column not in schema.names:
        raise no_column(name, column, schema.names)
    kind = schema.field(column).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind)):
        raise ValueError(f"{name}: the column {column!r} holds {kind}, not text; --text-column names another")
    return kind


def parquet_texts(table, column, kind, pyarrow):
    """The texts of a table as bytes, for a row that is no UTF-8 must not stop those beside it; one row group is in
    memory at a time."""
    for group in range(table.num_row_groups):
        for batch in table.iter_batches(256, [group], [column]):
            yield from batch.column(0).cast(kind).cast(pyarrow.large_binary()).to_pylist()


def read_file(file, how):
    """Yields (chunk, bytes of the file read) for a file."""
    kind = how.stdin_format if file.name == "-" else kind_of(file.name)
    with how.fetch(file.name) as path:
        yield from (read_parquet(path, file.name, how.column) if kind == "parquet" else
                    read_stream(path, file.name, kind, how))


def read_stream(path, name, kind, how):
    with opened(path, name) as (content, tell):
        lines = kind == "jsonl"
        chunks = read_json_lines(content, name, how.column) if lines else read_chunks(content, how.separator)
        for chunk in chunks:
            yield chunk, tell()


# -- their pieces


def document_hash(first_chunk):
    return int.from_bytes(hashlib.sha256(first_chunk).digest()[:8], "big")


class Extremes:
    """The lowest and the highest hash of all documents read."""

    def __init__(self, lowest=2**64, highest=-1):
        self.lowest, self.highest = lowest, highest

    def add(self, value):
        self.lowest, self.highest = min(value, self.lowest), max(value, self.highest)


def read_pieces(sources, how, limit, extremes, start=(0, 0), crc=0):
    """The pieces of all files in order, after place `start`; those before it in its file have the CRC `crc`.

    Raises ValueError where they have another: that file is not the one whose beginning was encoded. The rows of files
    are brought up to date as these are opened.
    """
    files = [(source, row.files, i) for source, row in enumerate(sources) for i in range(len(row.files))]
    for number in range(start[0], len(files)):
        source, row, i = files[number]
        if not row[i].name.startswith("hf:"):
            row[i] = file_at(row[i].name)  # as it is read now: what a build that goes on must find again
        file = row[i]
        skipped, count = start[1] if number == start[0] else 0, 0
        for piece in file_pieces(source, number, file, how, limit, extremes):
            count = piece.place[1]
            if count > skipped:
                yield piece
            elif count == skipped and piece.crc != crc:
                raise another(file)
        if count < skipped:
            raise another(file)


def another(file):
    return ValueError(f"{file.name} does not begin as it did when this build began; start over with what is there now, "
                      "after removing the half-done folder")


def file_pieces(source, number, file, how, limit, extremes):
    crc, split = 0, "train"
    for count, (chunk, read) in enumerate(read_file(file, how), 1):
        if chunk.starts and not chunk.note:
            value = document_hash(chunk.data)
            extremes.add(value)
            split = "val" if value < limit else "train"
        crc = zlib.crc32(chunk.note.encode("utf-8", "replace"), zlib.crc32(chunk.data, crc))
        yield Piece(source, split, file.name, chunk.data, chunk.ends, chunk.starts, chunk.note, (number, count), crc,
                    read)


# -- duplicates


class Seen:
    """A growing set of 64-bit hashes: for each value of the top byte a sorted array, which takes in the newest, a small
    set, one byte at a time, so that few are copied at once."""

    def __init__(self, keys=()):
        keys = np.unique(np.array(keys, np.uint64))
        ends = np.searchsorted(keys, np.arange(1, 256, dtype=np.uint64) << np.uint64(56))
        self.sorted, self.new = [part.copy() for part in np.split(keys, ends)], [set() for _ in range(256)]

    def add(self, key):
        """Adds a hash; whether it is new."""
        old, new = self.sorted[key >> 56], self.new[key >> 56]
        at = int(np.searchsorted(old, np.uint64(key)))
        if key in new or at < len(old) and int(old[at]) == key:
            return False
        new.add(key)
        if len(new) > max(1 << 8, len(old) // 16):
            self.sorted[key >> 56] = np.union1d(old, np.fromiter(new, np.uint64, len(new)))
            new.clear()
        return True


class Held:
    """The pieces of a document that is not judged yet; where it is long its text waits in a file."""

    def __init__(self):
        self.pieces, self.file = [], tempfile.SpooledTemporaryFile(HELD_IN_MEMORY)

    def add(self, piece):
        self.file.write(piece.data)
        self.pieces.append((piece._replace(data=b""), len(piece.data)))

    def take(self):
        """Yields the pieces held."""
        self.file.seek(0)
        yield from (piece._replace(data=self.file.read(size)) for piece, size in self.pieces)

    def clear(self):
        self.pieces = []
        self.file.seek(0)
        self.file.truncate()


def without_duplicates(pieces, seen):
    """The pieces, with a note in the place of each document whose whole text has been seen before."""
    held, digest = Held(), hashlib.sha256()
    with held.file:
        for piece in pieces:
            held.add(piece)
            digest.update(piece.data)
            if piece.ends:
                yield from judged(held, piece, digest, seen)
                held.clear()
                digest = hashlib.sha256()


def judged(held, last, digest, seen):
    key = int.from_bytes(digest.digest()[:8], "big")
    if last.note:
        yield last
    elif seen.add(key):
        yield from (piece._replace(key=key) if piece.ends else piece for piece in held.take())
    else:
        yield last._replace(data=b"", note=DUPLICATE)
