"""Text to token shards, and the tokenizers that read them back.

    python data/prepare.py build INPUT... --out DIR   text, JSON lines and parquet: files, folders of them, - for stdin
    python data/prepare.py train-tokenizer INPUT... --vocab-size N --out FILE   a tokenizer of your own, for build
    python data/prepare.py stdlib --out DIR           the Python standard library's own sources, as bytes
    python data/prepare.py import FILE... --out DIR   nanoGPT's or llm.c's token files, linked and not copied
    python data/prepare.py verify DIR                 read every shard and compare it with the manifest
    python data/prepare.py merge PART... --out DIR    the parts that build --part 1/8, 2/8, ... made, as one
    python data/prepare.py mix DIR=SHARE... --out DIR data folders as one that draws from them in given shares
    python data/prepare.py append DIR NEW...          the shards of other data folders to one that may be in use
    python data/prepare.py status DIR [OUT_DIR]       what there is, and when the run in OUT_DIR has seen all of it

A data folder holds manifest.json and shards (train-00000.bin, ...) of little-endian uint16 token ids; the
end-of-text id (eot) ends each document. It appears whole or not at all: it is written beside its place, manifest last,
and then renamed. A build that was killed goes on where it was when its command is given again.

Validation is split by document: a document belongs to val where the hash of its first MiB lies in the lowest
val_ratio of all 64-bit values. So its side depends neither on its name nor on the order of the files nor on
what else is there. Where this leaves val empty, the document with the lowest hash is taken. The manifest says below
which hash ("split"), and 'build --like DIR' takes that over, so that what is appended to DIR is split as DIR is.

Text passes through in chunks of at most 1 MiB, so memory does not grow with the input, and the bytes written
are the same for any number of workers. One process reads and unpacks for all workers: where there are more cores than
it can feed, run several builds with --part. Readers are in data/sources.py, the build is in data/building.py.
"""

import argparse
import concurrent.futures
import contextlib
import fractions
import functools
import hashlib
import json
import math
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

if __name__ == "__main__":  # as a script Python looks for modules beside it, not in the folder above
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from data.building import Options, Progress, build_data, locked, report, sample_texts
from data.download import downloaded, hub_source, places_of, tokenizer_on_the_hub
from data.shards import (ID, LEAST_SHARE, LLMC_HEADER, all_shards, fingerprint, fsync_folder, load_manifest,
                         manifest_problems, placeless, put, read_manifest, shard_problems, shard_row, stamp,
                         write_file, write_json, write_manifest)
from data.shards import (ShardHasher, StepQueue, Tokens, by_share, check_fingerprint,  # the trainer asks here
                         first_segments, grown, growth, losses_by_source, mixed_order, val_sources)
from data.sources import CHUNK, Reading, Source, file_at, find_sources, part_of, walk
from data.vocabulary import BYTES, ENDS_OF_TEXT, GPT2, NO_TOKENIZER, byte_tokenizer, load_tokenizer, train_bpe
from data.vocabulary import named_tokenizer as tokenizer_here


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


def named_tokenizer(word, vocab_size=0, end=""):
    """The tokenizer named on the command line, here or as owner/name[@revision] on the Hub."""
    return tokenizer_here(tokenizer_on_the_hub(word) or word, vocab_size, end)


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
    manifest, found = look_through(data_dir, progress)
    return manifest, [problem for _, problems in found for problem in problems]


def look_through(data_dir, progress):
    """The manifest and [(row of a file, its problems)] of all files that it lists, read side by side on all cores."""
    manifest = load_manifest(data_dir)
    problems = manifest_problems(manifest)
    if problems:
        raise ValueError(f"{data_dir} cannot be verified:\n  " + "\n  ".join(problems))
    by_size = [(shard, shard_problems(data_dir, shard)) for shard in all_shards(manifest)]
    bar = Progress(sum(shard["bytes"] for shard, wrong in by_size if not wrong), progress)
    one = functools.partial(problems_in, data_dir, manifest["vocab_size"], bar)
    found, pool = [], concurrent.futures.ThreadPoolExecutor(os.cpu_count())  # hashing leaves the others the interpreter
    try:
        found += zip([shard for shard, _ in by_size], pool.map(one, *zip(*by_size)))
    finally:
        pool.shutdown(cancel_futures=True)
    bar.end()
    if manifest["tokenizer"]["kind"] == "tokenizer.json" and not tokenizer_file(data_dir, manifest):
        found.append(({"file": "tokenizer.json", "sha256": manifest["tokenizer"]["sha256"]}, [
            "tokenizer.json: the file is missing or has another sha256 than the manifest says"]))
    return manifest, found


def problems_in(data_dir, vocab_size, bar, shard, by_size):
    """What is wrong with a shard: by its size, else by what is in it."""
    if by_size:
        return by_size
    name = shard["file"]
    try:
        sha256, _, beyond = scan(os.path.join(data_dir, name), shard["header_bytes"], vocab_size, -1, bar)
    except OSError as error:  # a bad sector, say
        return [f"{name}: it cannot be read: {error}"]
    changed = [f"{name}: sha256 is {sha256}, in the manifest {shard['sha256']}"] * (sha256 != shard["sha256"])
    return changed + [f"{name}: {beyond}"] * bool(beyond)


def repair(data_dir, rows, given):
    """Fetches these files of a data folder again from a dataset repository on the Hub; what was wrong with that.

    Each takes its place at one instant, once it has the recorded hash; one that has not changes nothing.
    """
    problems, aside = [], Path(data_dir, ".repair")
    with locked(Path(data_dir)):
        for row, place in places_of(given, rows):
            if not place:
                problems.append(f"{row['file']}: {given} has no file with its sha256 or its name")
                continue
            with downloaded(place, aside) as local:
                with open(local, "rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                if sha256 == row["sha256"]:
                    put(Path(local), Path(data_dir, row["file"]))
                else:
                    problems.append(f"{row['file']}: {place} has sha256 {sha256}, in the manifest {row['sha256']}")
        shutil.rmtree(aside, ignore_errors=True)
    return problems


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


# -- joining data folders


def merge(out_dir, folders):
    """Makes a data folder of links to the shards of others, in the order of their parts, and returns its manifest.

    Raises ValueError naming every reason why they do not go together.
    """
    manifests = [(folder, read_manifest(folder)) for folder in folders]
    problems = part_problems(manifests) + not_mixed(manifests)
    if all("part" not in manifest for _, manifest in manifests):  # parts of one text may well hold the same
        problems += held_twice(manifests)
    manifests.sort(key=lambda row: row[1].get("part", [0])[0])
    first = manifests[0][1]
    for folder, manifest in manifests[1:]:
        problems += [f"{folder}: its {key} is {manifest.get(key)}, in {manifests[0][0]} it is {first.get(key)}"
                     for key in ("vocab_size", "tokenizer", "split") if manifest.get(key) != first.get(key)]
        if manifest.get("part_of") != first.get("part_of"):
            problems.append(f"{folder}: it is a part of other files than {manifests[0][0]}, or of files that were read "
                            "otherwise: some were added, changed or left out between the two builds; build it again")
    if not any(manifest["train"] for _, manifest in manifests):
        problems.append("there is no training text in any of them")
    if problems:
        raise ValueError("nothing was merged:\n  " + "\n  ".join(problems))
    with new_folder(out_dir) as folder:
        for name, content in tokenizer_file(manifests[0][0], first).items():
            write_file(folder / name, content)
        rows = {split: link_shards(folder, split, 0, manifests, split) for split in ("train", "val")}
        sources = joined_sources(row for _, manifest in manifests for row in manifest["sources"])
        split = {"split": first["split"]} if "split" in first else {}
        return write_manifest(folder, first["tokenizer"], first["vocab_size"], rows["train"], rows["val"], sources,
                              **split)


def part_problems(manifests):
    """What is wrong with the parts that were given: all must be there, each once."""
    places = Counter(os.path.realpath(folder) for folder, _ in manifests)
    problems = [f"{folder}: named {times} times" for folder, times in places.items() if times > 1]
    parts = [tuple(manifest["part"]) for _, manifest in manifests if "part" in manifest]
    if not parts:
        return problems
    if len(parts) < len(manifests):
        problems.append("some are parts and some are not; append takes whole folders")
    for count in sorted({count for _, count in parts}):
        times = Counter(number for number, of in parts if of == count)
        problems += [f"part {number}/{count} is given {times[number]} times, not once"
                     for number in range(1, count + 1) if times[number] != 1]
    return problems


def held_twice(manifests):
    """The training shards that two of the folders hold."""
    first, problems = {}, []
    for folder, manifest in manifests:
        problems += [f"{folder}: its {shard['file']} is in {first[shard['sha256']]} too" for shard in manifest["train"]
                     if first.setdefault(shard["sha256"], folder) != folder]
    return problems


def link_shards(folder, stem, begin, manifests, split):
    """Links the shards of the split as STEM-NUMBER.bin with the numbers from begin on, and returns their rows."""
    rows = []
    for source, manifest in manifests:
        for shard in manifest[split]:
            name = f"{stem}-{begin + len(rows):05d}.bin"
            temporary = folder / f".{name}.new"
            temporary.unlink(missing_ok=True)
            link(Path(source, shard["file"]).resolve(), temporary)
            os.replace(temporary, folder / name)  # over what a killed append has left
            temporary.unlink(missing_ok=True)  # replace leaves a link to the same file
            rows.append(shard | {"file": name})
    return rows


def joined_sources(rows):
    """The rows of the manifest's sources with their numbers added up by name and revision."""
    joined = {}
    for row in rows:
        sums = joined.setdefault((row["name"], row["revision"]), {})
        for key, value in row.items():
            sums[key] = sums.get(key, 0) + value if isinstance(value, int) else value
    return list(joined.values())


def mix(out_dir, shares, tokens, seed):
    """Makes a data folder of links to the shards of others, from which a run draws in these shares, [(folder, share as
    a Fraction), ...], and returns its manifest. `tokens` of it count as a pass; 0: about as many as draw none twice.

    Raises ValueError naming every reason why they do not go together.
    """
    manifests = [(folder, read_manifest(folder)) for folder, _ in shares]
    problems = mix_problems(manifests, shares, tokens)
    if problems:
        raise ValueError("nothing was mixed:\n  " + "\n  ".join(problems))
    first, sources = manifests[0][1], []
    unit = math.lcm(*(share.denominator for _, share in shares))
    whole = [int(share * unit) for _, share in shares]
    for (folder, manifest), share in zip(manifests, whole):
        counts = {key: sum(shard["tokens"] for shard in manifest[split])
                  for split, key in (("train", "tokens"), ("val", "val_tokens"))}
        sources.append({"name": source_name(folder), "folder": str(folder), "share": share // math.gcd(*whole),
                        "fingerprint": fingerprint(manifest), "train_shards": len(manifest["train"]),
                        "val_shards": len(manifest["val"]), **counts})
    tokens = tokens or min(source["tokens"] * sum(whole) // share for source, share in zip(sources, whole))
    with new_folder(out_dir) as folder:
        for name, content in tokenizer_file(manifests[0][0], first).items():
            write_file(folder / name, content)
        rows = {split: [row for source, manifest in manifests for row in link_shards(
            folder, f"{source_name(source)}-{split}", 0, [(source, manifest)], split)] for split in ("train", "val")}
        return write_manifest(folder, first["tokenizer"], first["vocab_size"], rows["train"], rows["val"],
                              joined_sources(row for _, manifest in manifests for row in manifest["sources"]),
                              mixture={"seed": seed, "tokens": tokens, "sources": sources})


def source_name(folder):
    return os.path.basename(os.path.realpath(folder))


def mix_problems(manifests, shares, tokens):
    """What is wrong with the sources of a mixture."""
    problems = part_problems(manifests) if all("part" not in manifest for _, manifest in manifests) else [
        f"{folder}: it is part {manifest['part'][0]}/{manifest['part'][1]}; merge the parts first"
        for folder, manifest in manifests if "part" in manifest]
    problems += not_mixed(manifests) + held_twice(manifests)
    names = Counter(source_name(folder) for folder in dict.fromkeys(os.path.realpath(row[0]) for row in manifests))
    problems += [f"{times} folders have the name {name}, by which a source is known; rename or link one"
                 for name, times in names.items() if times > 1]
    (here, first), total = manifests[0], sum(share for _, share in shares)
    for folder, manifest in manifests[1:]:
        problems += [f"{folder}: its {key} is {manifest[key]}, in {here} it is {first[key]}"
                     for key in ("vocab_size", "tokenizer") if manifest[key] != first[key]]
    problems += [f"{folder}: its share is {float(share):g} of {float(total):g}; at least {float(LEAST_SHARE)} of the "
                 "whole is wanted" for folder, share in shares if share <= 0 or share < LEAST_SHARE * total]
    problems += [f"{folder}: it has no training text" for folder, manifest in manifests if not manifest["train"]]
    return problems + ([f"--tokens is {tokens:,}; it must not be negative"] if tokens < 0 else [])


def not_mixed(manifests):
    return [f"{folder}: it is a mixture; its sources cannot change or grow, so change them and mix anew"
            for folder, manifest in manifests if "mixture" in manifest]


def append(data_dir, folders, progress=True):
    """Appends the training shards of data folders to that of data_dir, all of them at one instant; its manifest.

    A run that uses it takes them up when its pass ends. Validation stays as it is. Raises ValueError naming every
    reason why they do not go together.
    """
    with locked(Path(data_dir)):
        manifest = read_manifest(data_dir)
        if refused := not_mixed([(data_dir, manifest)]):
            raise ValueError(f"nothing was appended to {refused[0]}")
        news = [(folder, *verify(folder, progress)) for folder in folders]
        problems = [f"{folder}: {problem}" for folder, _, found in news for problem in found]
        news = [(folder, new) for folder, new, _ in news]
        problems += not_mixed(news) or [problem for folder, new in news
                                        for problem in append_problems(manifest, folder, new)]
        problems += part_problems([*news, (data_dir, {})]) + held_twice(news) if not problems else []
        if problems:
            raise ValueError(f"nothing was appended to {data_dir}:\n  " + "\n  ".join(problems))
        rows = link_shards(Path(data_dir), "train", next_number(manifest["train"]), news, "train")
        fsync_folder(data_dir)
        grown_manifest = manifest | {"train": [*manifest["train"], *rows], "sources": joined_sources(
            [*manifest["sources"], *(train_only(row) for _, new in news for row in new["sources"])])}
        write_json(Path(data_dir, "manifest.json"), grown_manifest)
        return grown_manifest


def next_number(shards):
    """The number above all that the names of shards hold."""
    return max([len(shards), *(1 + int(number) for shard in shards
                               for number in re.findall(r"^train-(\d+)\.bin$", shard["file"]))])


def append_problems(manifest, folder, new):
    """Why the training text of a folder may not go into the data of this manifest."""
    problems = [f"{folder}: its {key} is {new[key]}, here it is {manifest[key]}"
                for key in ("vocab_size", "tokenizer") if new[key] != manifest[key]]
    if "part" in new:
        problems.append(f"{folder}: it is part {new['part'][0]}/{new['part'][1]}; merge the parts first")
    hashes = {shard["sha256"] for shard in manifest["train"]}
    problems += [f"{folder}: its {shard['file']} is in the data already" for shard in new["train"]
                 if shard["sha256"] in hashes]
    here, there = (data.get("split", {}).get("val_below", 0) for data in (manifest, new))
    if here > there:
        trains = ("it trains on documents that are for validation here" if "split" in new else
                  "nothing says whether its documents are for validation here, for 'build' did not split them")
        problems.append(f"{folder}: {trains}; make it again with 'build --like' and the folder to append to")
    return problems


def train_only(row):
    """A row of a manifest's sources without what is for validation."""
    return {key: value - row.get(f"val_{key}", 0) if key in ("documents", "tokens") else value
            for key, value in row.items() if not key.startswith("val_")}


def link(path, name):
    try:
        os.link(path, name)
    except OSError:  # on another file system, or one without hard links
        os.symlink(path, name)


# -- how far a run is


def run_state(out_dir):
    """What the newest checkpoint of a run and its last rows say: windows, block_size, segments, tokens_per_s (0: not
    known) and step. Raises ValueError where there is no checkpoint.
    """
    try:
        pointer = json.loads(Path(out_dir, "latest.json").read_bytes())
        trainer = json.loads(Path(out_dir, "checkpoints", pointer["checkpoint"], "trainer.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{out_dir} has no run with a checkpoint to look at ({error})") from None
    rates = []
    if (path := Path(out_dir, "metrics.jsonl")).exists():
        with open(path, "rb") as file:
            file.seek(max(path.stat().st_size - (1 << 16), 0))
            for line in file.read().splitlines()[1:][-20:]:
                with contextlib.suppress(ValueError, KeyError):  # the last line may be torn, a rate not known
                    rates.append(float(json.loads(line)["tokens_per_s"]))
    return {"step": trainer["step"], "windows": trainer["windows"], "segments": trainer["segments"],
            "source_tokens": trainer.get("source_tokens"), "block_size": trainer["settings"]["block_size"],
            "tokens_per_s": float(np.median(rates)) if rates else 0}


def undrawn(manifest, run):
    """(windows of data that the run has not drawn yet, number of them that it has not even taken up).

    After a growth the next pass runs over what is new, so what is undrawn is what is left of that pass, and what was
    appended since. A window on a border counts once.
    """
    first, shards, *mixture = run["segments"][-1]
    if mixture:  # it does not grow
        return max((mixture[0]["tokens"] - 1) // run["block_size"] - run["windows"], 0), 0
    taken_up = sum(shard["tokens"] for shard in shards)
    covered = sum(shard["tokens"] for shard in run["segments"][-2][1]) if len(run["segments"]) > 1 else 0
    left = max(first + (taken_up - covered - 1) // run["block_size"] - run["windows"], 0)
    waiting = sum(shard["tokens"] for shard in manifest["train"]) - taken_up
    waiting = max((waiting - 1) // run["block_size"], 0) if waiting else 0
    return left + waiting, waiting


def again_before_growth(run):
    """The windows left of a pass that draws all data once more: what was appended is taken up at its end."""
    first, shards = run["segments"][-1][:2]
    taken_up, block_size = sum(shard["tokens"] for shard in shards), run["block_size"]
    covered = sum(shard["tokens"] for shard in run["segments"][-2][1]) if len(run["segments"]) > 1 else 0
    fresh = (taken_up - covered - 1) // block_size
    over = run["windows"] - first - fresh  # windows since each was drawn once
    return -over % ((taken_up - 1) // block_size) if over > 0 else 0


def print_run(out_dir, manifest):
    """Says how much of the data a run has drawn. Raises ValueError where they are not the data of that run."""
    run = run_state(out_dir)
    grown(run["segments"][-1][1], manifest["train"])
    recorded, present = run["segments"][-1][2:], [manifest["mixture"]] if "mixture" in manifest else []
    if list(map(placeless, recorded)) != list(map(placeless, present)):
        raise ValueError(f"the run in {out_dir} draws from another mixture than the one in these data")
    left, waiting = undrawn(manifest, run)
    again = again_before_growth(run) if waiting else 0
    drawn = run["windows"] * run["block_size"]
    print(f"{out_dir}\n  step {run['step']:,}, {run['windows']:,} windows drawn, {drawn:,} tokens\n"
          f"  {left:,} windows not drawn yet, {waiting:,} of them not taken up yet")
    if run["source_tokens"]:
        print_mixture(manifest, run["source_tokens"])
    if not left:
        print("  all data have been drawn; the run goes over them again until more is appended")
    elif run["tokens_per_s"]:
        seconds = (left + again) * run["block_size"] / run["tokens_per_s"]
        first = f", after the {again:,} windows that this pass draws again" * (again > 0)
        print(f"  at {run['tokens_per_s']:,.0f} tokens/s all data have been drawn in {hours(seconds)}{first}")


def hours(seconds):
    return f"{seconds // 3600:.0f} h {seconds // 60 % 60:02.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


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
    tokenizer, val_below = like(args) if args.like else (named_tokenizer(
        args.tokenizer or "bytes", end=args.end_of_text), -1)
    sources = sources_of(args.inputs, args.glob)
    how, whole = Reading(args.document_separator.encode(), args.text_column, args.stdin_format), ""
    if args.part != (1, 1):
        whole, sources = digest_of(sources, how), part_of(sources, *args.part)
    options = Options(args.val_ratio, args.shard_tokens, args.dedup, args.part, val_below, whole)
    manifest = build_data(args.out, sources, tokenizer, how, options, args.workers, args.keep_raw)
    print_summary(args.out, manifest)


def digest_of(sources, how):
    """sha256 of what is divided into parts, wherever it lies: all must have divided the same files."""
    listed = [[source.revision, [[os.path.basename(file.name), file.size] for file in source.files]]
              for source in sources]
    return hashlib.sha256(json.dumps([listed, how.separator.decode(), how.column]).encode()).hexdigest()


def like(args):
    """The tokenizer of the folder --like, and below which hash its documents are for validation."""
    manifest = read_manifest(args.like)
    if args.tokenizer or args.end_of_text:
        raise ValueError("--like takes the tokenizer of that folder; leave --tokenizer and --end-of-text out")
    if "split" not in manifest:
        raise ValueError(f"{args.like} does not say which documents are for validation, for they were not split by "
                         "'build'; give --tokenizer and --val-ratio instead of --like")
    file = os.path.join(args.like, "tokenizer.json")
    return load_tokenizer(manifest["tokenizer"], manifest["vocab_size"], file), manifest["split"]["val_below"]


def train_tokenizer_command(args):
    if os.path.exists(args.out):
        raise ValueError(f"{args.out} is there; name another file, or remove it first")
    sources = sources_of(args.inputs, args.glob)
    how = Reading(args.document_separator.encode(), args.text_column)
    with tempfile.TemporaryDirectory(prefix=".raw-", dir=os.path.dirname(os.path.abspath(args.out))) as raw:
        content = train_bpe(sample_texts(sources, how, args.sample_mb * 1e6, args.val_ratio, raw), args.vocab_size)
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
        tokenizer = named_tokenizer(args.tokenizer, args.vocab_size, args.end_of_text)
        identity, vocab_size, file = tokenizer.identity, tokenizer.vocab_size, tokenizer.file
    print_summary(args.out, import_tokens(args.out, args.files, args.val, identity, vocab_size, file))


def merge_command(args):
    manifest = merge(args.out, args.parts)
    print_summary(args.out, manifest)
    if not manifest["val"]:
        print("note: no document of any part is for validation; a run on these data has no validation loss",
              file=sys.stderr)


def mix_command(args):
    manifest = mix(args.out, args.sources, args.tokens, args.seed)
    print_summary(args.out, manifest)
    print_mixture(manifest)


def print_mixture(manifest, drawn=None):
    """The shares of a mixture's sources and how often its tokens go through each, or a run has."""
    mixture = manifest["mixture"]
    total = sum(source["share"] for source in mixture["sources"])
    print(f"  {mixture['tokens']:,} tokens count as a pass of the mixture")
    for source in mixture["sources"]:
        wanted = mixture["tokens"] * source["share"] // total if drawn is None else drawn[source["name"]]
        print(f"  {source['name']}: share {source['share'] / total:.4f}, {source['tokens']:,} train and "
              f"{source['val_tokens']:,} val tokens, {wanted:,} tokens {'drawn' if drawn else 'to draw'} = "
              f"{wanted / source['tokens']:.2f} passes of it")


def append_command(args):
    print_summary(args.dir, append(args.dir, args.new))


def status_command(args):
    manifest = read_manifest(args.dir)
    print_summary(args.dir, manifest)
    for row in manifest["sources"]:
        more = [f"{row[key]:,} {key}" for key in ("malformed", "blank", "duplicates") if key in row]
        left_out = f", left out {', '.join(more)}" if more else ""
        print(f"  {row['tokens']:,} tokens in {row['documents']:,} documents of {row['name']}{left_out}")
    tokens = sum(shard["tokens"] for shard in manifest["train"])
    block_size = run_state(args.out_dir)["block_size"] if args.out_dir else args.block_size
    print(f"  {max((tokens - 1) // block_size, 0):,} training windows of {block_size:,} tokens\n"
          f"  every file is there and has its size; {hash_state(args.dir, manifest)}")
    if "mixture" in manifest and not args.out_dir:
        print_mixture(manifest)
    if args.out_dir:
        print_run(args.out_dir, manifest)


def verify_command(args):
    before = stamps_of(args.dir, load_manifest(args.dir))
    manifest, found = look_through(args.dir, True)
    for problem in (problems := [problem for _, wrong in found for problem in wrong]):
        print(problem, file=sys.stderr)
    if problems and args.repair:
        damaged = [row for row, wrong in found if wrong]
        problems, before = repair(args.dir, damaged, args.repair), stamps_of(args.dir, manifest)
        if not problems:  # ids beyond the vocabulary, say, are there again
            problems = [problem for row in damaged if "tokens" in row for problem in problems_in(
                args.dir, manifest["vocab_size"], Progress(0, False), row, shard_problems(args.dir, row))]
        for problem in problems:
            print(problem, file=sys.stderr)
        print(f"{len(damaged) - len(problems):,} of {len(damaged):,} file(s) fetched again from {args.repair}",
              file=sys.stderr)
        file_of_sha256.cache_clear()
    if problems:
        print(f"{args.dir} is damaged: {len(problems):,} problem(s) above", file=sys.stderr)
        return 1
    remember_verified(args.dir, manifest, before)
    print_summary(args.dir, manifest)
    print("  every shard is what the manifest says")


def stamps_of(data_dir, manifest):
    """{file: [its recorded sha256, what tells it from what it may become]} of the shards that are there."""
    found = {}
    for shard in all_shards(manifest):
        with contextlib.suppress(OSError, KeyError, TypeError):  # what is wrong with it is said elsewhere
            found[shard["file"]] = [shard["sha256"], *stamp(os.stat(os.path.join(data_dir, shard["file"])))]
    return found


def remember_verified(data_dir, manifest, before):
    """Leaves verified.json in a data folder: when its shards had their hashes, and what they looked like, `before` they
    were read and after it."""
    now = stamps_of(data_dir, manifest)
    stamps = {name: found for name, found in before.items() if now.get(name) == found}
    with contextlib.suppress(OSError):  # a folder may be read-only, or full
        write_json(Path(data_dir, "verified.json"), {"time": time.time(), "shards": stamps})


def hash_state(data_dir, manifest):
    """How many shards had their hashes when they were last read, and have not been touched since."""
    try:
        found = json.loads(Path(data_dir, "verified.json").read_bytes())
        when, stamps = time.strftime("%Y-%m-%d %H:%M", time.localtime(found["time"])), dict(found["shards"])
    except (OSError, ValueError, TypeError, KeyError):
        return "no hash has been compared here yet; 'verify' does"
    shards = stamps_of(data_dir, manifest)
    same = sum(stamps.get(name) == found for name, found in shards.items())
    return (f"{same:,} of {len(shards):,} had their hashes on {when} and have not been touched since"
            + "; 'verify' compares all" * (same < len(shards)))


def part(word):
    """(i, n) of 'i/n'."""
    number, count = map(int, word.split("/"))
    if not 1 <= number <= count:
        raise ValueError
    return number, count


def share(word):
    """(folder, share) of 'folder=share'."""
    folder, number = word.rsplit("=", 1)
    try:
        return folder, fractions.Fraction(number)
    except ZeroDivisionError as error:
        raise ValueError(f"{number} is no share") from error


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
    build.add_argument("--tokenizer", default="", metavar="NAME",
                       help="bytes (default), tiktoken's gpt2, r50k_base or p50k_base, a tokenizer.json or its folder, "
                            "or owner/name[@revision]: that of a repository on the Hub")
    build.add_argument("--end-of-text", default="", metavar="TOKEN",
                       help="the special token of a tokenizer.json that ends a document (default: the first that it "
                            f"has of {', '.join(ENDS_OF_TEXT)})")
    build.add_argument("--document-separator", default="", metavar="TEXT",
                       help="what stands between the documents of a text file; without it a file is one document")
    build.add_argument("--text-column", default="text", metavar="NAME",
                       help="where JSON lines and parquet have the text (default text)")
    build.add_argument("--stdin-format", default="text", choices=("text", "jsonl"), help="of - (default text)")
    build.add_argument("--keep-raw", action="store_true",
                       help="leave the files of hf: in the cache of huggingface_hub; else each is deleted after use")
    build.add_argument("--dedup", action="store_true",
                       help="drop documents whose text was there before, by a 64-bit hash; about 16 bytes of memory "
                            "for each")
    build.add_argument("--part", type=part, default=(1, 1), metavar="I/N",
                       help="only the I-th of N parts of the files, on one of N machines; then merge. "
                            "--dedup sees the documents of its part alone")
    build.add_argument("--like", default="", metavar="DIR",
                       help="the tokenizer of a data folder and its documents for validation: to append to it")
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
    imports.add_argument("--end-of-text", default="", metavar="TOKEN", help="as of build")
    imports.add_argument("--vocab-size", type=int, default=0, metavar="N", help="with --tokenizer none")

    verifies = commands.add_parser("verify", help="read every shard; exit 0 if whole, 1 if damaged")
    verifies.add_argument("dir", metavar="DIR")
    verifies.add_argument("--repair", default="", metavar="OWNER/NAME",
                          help="fetch what is damaged again from a dataset on the Hub, found by its hash or name")
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

    merges = commands.add_parser("merge", help="the parts of a build, or whole data folders, as one")
    merges.add_argument("parts", nargs="+", metavar="PART", help="a data folder; its shards are linked, not copied")

    mixes = commands.add_parser("mix", help="a data folder that draws from others in given shares")
    mixes.add_argument("sources", nargs="+", type=share, metavar="DIR=SHARE",
                       help="a data folder and its share of the tokens, as in data/web=0.7 data/code=0.3; the shares "
                            "need not add up to 1. Its shards are linked, not copied, as they are now")
    mixes.add_argument("--tokens", type=int, default=0, metavar="N",
                       help="how many count as a pass (default: about as many as draw no source twice)")
    mixes.add_argument("--seed", type=int, default=0, metavar="S", help="of the order of the sources (default 0)")

    appends = commands.add_parser("append", help="more training data for a folder that may be in use")
    appends.add_argument("dir", metavar="DIR")
    appends.add_argument("new", nargs="+", metavar="NEW", help="a data folder; its training shards are linked")
    appends.set_defaults(run=append_command)

    statuses = commands.add_parser("status", help="what a data folder holds, and how far a run has drawn it")
    statuses.add_argument("dir", metavar="DIR")
    statuses.add_argument("out_dir", nargs="?", metavar="OUT_DIR", help="the folder of a run on these data")
    statuses.add_argument("--block-size", type=int, default=1024, metavar="N", help="without OUT_DIR (default 1024)")
    statuses.set_defaults(run=status_command)

    for command, run in ((build, build_command), (stdlib, stdlib_command), (imports, import_command),
                         (merges, merge_command), (mixes, mix_command)):
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
