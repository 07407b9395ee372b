"""Text to token shards, and the tokenizers that read them back.

    python data/prepare.py build INPUT... --out DIR   text, JSON lines and parquet: files, folders of them, - for stdin
    python data/prepare.py train-tokenizer INPUT... --vocab-size N --out FILE   a tokenizer of your own, for build
    python data/prepare.py stdlib --out DIR           the Python standard library's own sources, as bytes
    python data/prepare.py import FILE... --out DIR   nanoGPT's or llm.c's token files, linked and not copied
    python data/prepare.py verify DIR                 read every shard and compare it with the manifest

A data folder holds manifest.json and shards (train-00000.bin, ...) of little-endian uint16 token ids; the
end-of-text id (eot) ends each document. It appears whole or not at all: it is written beside its place, manifest last,
and then renamed. A build that was killed goes on where it was when its command is given again.

Validation is split by document: a document belongs to val where the hash of its first MiB lies in the lowest
val_ratio of all 64-bit values. So its side depends neither on its name nor on the order of the files nor on
what else is there. Where this leaves val empty, the document with the lowest hash is taken.

Text passes through in chunks of at most 1 MiB, so memory does not grow with the input, and the bytes written
are the same for any number of workers. Readers are in data/sources.py, the build is in data/building.py.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import hashlib
import os
import platform
import re
import shutil
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # as a script Python looks for modules beside it, not in the folder above
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from data.building import Options, Progress, build_data, report, sample_texts
from data.download import hub_source
from data.shards import (ID, LLMC_HEADER, all_shards, fingerprint, fsync_folder, load_manifest, manifest_problems,
                         read_manifest, shard_problems, shard_row, write_file, write_manifest)
from data.shards import ShardHasher, Tokens, check_fingerprint, grown, growth  # the trainer's, which asks here
from data.sources import CHUNK, Reading, Source, file_at, find_sources, walk
from data.vocabulary import BYTES, GPT2, NO_TOKENIZER, byte_tokenizer, load_tokenizer, named_tokenizer, train_bpe


# -- what the trainer opens


def open_data(data_dir, build):
    """The checked manifest of a data folder; build='stdlib' makes the embedded corpus where there is no folder."""
    if build == "stdlib" and not (os.path.isdir(data_dir) and os.listdir(data_dir)):
        print(f"building the embedded corpus (Python's own sources, as bytes) in {data_dir}", flush=True)
        build_stdlib(data_dir)
    return read_manifest(data_dir)


def open_tokenizer(manifest, say, data_dir=""):
    """The tokenizer of the data, or None with a word why where it cannot be had."""
    if manifest["tokenizer"]["kind"] == "none":
        return None
    try:
        return load_tokenizer(manifest["tokenizer"], file=os.path.join(data_dir, "tokenizer.json"))
    except (ValueError, OSError) as error:
        return say(f"no samples and no bits per byte: {error}")


def tokenizer_file(data_dir, manifest):
    """{'tokenizer.json': its bytes} where the data were made with one, else {}: what a checkpoint takes along, so that
    text can be made of it anywhere."""
    return dict(file_of_sha256(Path(data_dir, "tokenizer.json"), manifest["tokenizer"]["sha256"]))


@functools.lru_cache(1)
def file_of_sha256(path, sha256):
    """[(name, bytes)] of a file with this hash, else [], read once."""
    try:
        content = path.read_bytes()
    except OSError:  # another kind of tokenizer; or it is lost, and open_tokenizer has said so
        return []
    return [(path.name, content)] if hashlib.sha256(content).hexdigest() == sha256 else []


# -- the embedded corpus


def build_stdlib(out_dir, progress=True):
    """Builds the embedded corpus, the standard library's own sources without tests; returns its manifest."""
    folder = sysconfig.get_path("stdlib")
    left_out = ("test", "tests", "idle_test", "site-packages", "dist-packages")
    files = [path for path in walk(folder, left_out)
             if path.endswith(".py") and "_sysconfigdata" not in path]  # that one differs per machine
    if not files:
        raise ValueError(f"this Python keeps no sources in {folder}; use 'build' with text of your own")
    source = Source("python-stdlib", platform.python_version(), [file_at(path) for path in files])
    return build_data(out_dir, [source], byte_tokenizer(), options=Options(val_ratio=0.05), progress=progress)


# -- importing and verifying


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
    if manifest["tokenizer"]["kind"] == "tokenizer.json" and not tokenizer_file(data_dir, manifest):
        problems.append("tokenizer.json: the file is missing or has another sha256 than the manifest says")
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


def import_tokens(out_dir, files, val_files, tokenizer, vocab_size, tokenizer_json="", progress=True):
    """Makes a data folder of links to token files, read once, and returns its manifest.

    tokenizer is an identity, tokenizer_json its file where it has one. Validation is val_files and those files that
    have 'val' as a word in their name.
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
        if tokenizer_json:
            shutil.copyfile(tokenizer_json, folder / "tokenizer.json")
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


def print_summary(data_dir, manifest):
    documents = sum(row["documents"] for row in manifest["sources"])
    tokenizer = manifest["tokenizer"]["name"] or "none"
    print(f"{data_dir}\n  documents {documents:>14,}")
    for split in ("train", "val"):
        tokens = sum(shard["tokens"] for shard in manifest[split])
        print(f"  {split:9} {tokens:>14,} tokens in {len(manifest[split]):,} shard(s)")
    print(f"  tokenizer {tokenizer:>14}, {manifest['vocab_size']:,} ids")
    print(f"  data fingerprint {fingerprint(manifest)}")


def sources_of(inputs, glob):
    """A Source for each input, in their order."""
    local, binary = find_sources([given for given in inputs if not given.startswith("hf:")])
    if binary:
        report(f"left out as binary ({len(binary):,})", binary)
    local = iter(local)
    return [hub_source(given, glob) if given.startswith("hf:") else next(local) for given in inputs]


def build_command(args):
    if args.tokenizer == "none":
        raise ValueError("build turns text into ids and needs a tokenizer: bytes, gpt2 or another of tiktoken, or a "
                         "tokenizer.json")
    tokenizer = named_tokenizer(args.tokenizer)
    sources = sources_of(args.inputs, args.glob)
    how = Reading(args.document_separator.encode(), args.text_column, args.stdin_format)
    options = Options(args.val_ratio, args.shard_tokens, args.dedup)
    manifest = build_data(args.out, sources, tokenizer, how, options, args.workers, args.keep_raw)
    print_summary(args.out, manifest)


def train_tokenizer_command(args):
    if os.path.exists(args.out):
        raise ValueError(f"{args.out} is there; name another file, or remove it first")
    sources = sources_of(args.inputs, args.glob)
    how = Reading(args.document_separator.encode(), args.text_column)
    content = train_bpe(sample_texts(sources, how, args.sample_mb * 1e6, args.val_ratio), args.vocab_size)
    write_file(Path(args.out), content.encode())
    tokenizer = named_tokenizer(args.out)
    print(f"{args.out}\n  {tokenizer.vocab_size:,} ids, end of text {tokenizer.eot}\n  sha256 "
          f"{tokenizer.identity['sha256']}")
    if tokenizer.vocab_size < args.vocab_size:
        print(f"note: the sample has no more than {tokenizer.vocab_size:,} of the {args.vocab_size:,} ids asked for; "
              "train on more text", file=sys.stderr)


def stdlib_command(args):
    print_summary(args.out, build_stdlib(args.out))


def import_command(args):
    if args.vocab_size and args.tokenizer != "none":
        raise ValueError(f"--vocab-size goes with --tokenizer none; {args.tokenizer} has a size of its own")
    if args.tokenizer == "gpt2":  # known without its vocabulary, which may be out of reach
        identity, vocab_size, file = GPT2, 50257, ""
    else:
        tokenizer = named_tokenizer(args.tokenizer, args.vocab_size)
        identity, vocab_size, file = tokenizer.identity, tokenizer.vocab_size, tokenizer.file
    print_summary(args.out, import_tokens(args.out, args.files, args.val, identity, vocab_size, file))


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
    build.add_argument("inputs", nargs="+", metavar="INPUT",
                       help="text, .jsonl, .parquet, also .gz or .zst; a folder of them; - for stdin; "
                            "hf:owner/name@revision for a dataset on the Hub")
    build.add_argument("--glob", default="", metavar="PATTERN",
                       help="which files of hf:, as in 'sample/10BT/*.parquet' (default: parquet and JSON lines)")
    build.add_argument("--tokenizer", default="bytes", metavar="NAME",
                       help="bytes (default), tiktoken's gpt2, r50k_base or p50k_base, a tokenizer.json or its folder")
    build.add_argument("--document-separator", default="", metavar="TEXT",
                       help="what stands between the documents of a text file; without it a file is one document")
    build.add_argument("--text-column", default="text", metavar="NAME",
                       help="where JSON lines and parquet have the text (default text)")
    build.add_argument("--stdin-format", default="text", choices=("text", "jsonl"), help="of - (default text)")
    build.add_argument("--keep-raw", action="store_true",
                       help="leave the files of hf: in the cache of huggingface_hub; else each is deleted after use")
    build.add_argument("--dedup", action="store_true",
                       help="drop documents whose text was there before, by a 64-bit hash; 8 bytes of memory for each")
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
                         help="what made the ids: gpt2 (default), bytes, another of tiktoken's, a tokenizer.json, none")
    imports.add_argument("--vocab-size", type=int, default=0, metavar="N", help="with --tokenizer none")

    verifies = commands.add_parser("verify", help="read every shard; exit 0 if whole, 1 if damaged")
    verifies.add_argument("dir", metavar="DIR")
    verifies.set_defaults(run=verify_command)

    trains = commands.add_parser("train-tokenizer", help="a byte-level BPE of a size you choose, as a tokenizer.json")
    trains.add_argument("inputs", nargs="+", metavar="INPUT", help="as of build")
    trains.add_argument("--vocab-size", type=int, required=True, metavar="N", help="ids, the end of text among them")
    trains.add_argument("--out", required=True, metavar="FILE", help="the tokenizer.json to make")
    trains.add_argument("--sample-mb", type=float, default=1000, metavar="MB",
                        help="about so much of the files is used, chosen by document hash (default 1000)")
    trains.add_argument("--val-ratio", type=float, default=0.01, metavar="R",
                        help="as of build: documents for validation are left out (default 0.01)")
    trains.add_argument("--glob", default="", metavar="PATTERN", help="as of build")
    trains.add_argument("--document-separator", default="", metavar="TEXT", help="as of build")
    trains.add_argument("--text-column", default="text", metavar="NAME", help="as of build")
    trains.set_defaults(run=train_tokenizer_command)

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
        problem = "interrupted; the same command goes on from what was saved, or begins anew"
    print(f"prepare.py: {problem}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
