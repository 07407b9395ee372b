"""Files of a dataset repository on the Hugging Face Hub, on this disk while they are read."""

import concurrent.futures
import contextlib
import fnmatch
import os
import re
import threading
from pathlib import Path

from data.sources import File, Source, kind_of

ON_THE_HUB = r"([\w.-]+/[\w.-]+)(?:@(.+))?"


def hub_source(given, glob):
    """The Source of hf:owner/name[@revision]: the files that match glob ('': parquet and JSON lines), by name.

    The revision is resolved to a commit, so that the files stay what they are. Raises ValueError where there are none.
    """
    found = re.fullmatch(f"hf:{ON_THE_HUB}", given)
    if not found:
        raise ValueError(f"{given!r} names no dataset; write hf:owner/name or hf:owner/name@revision")
    name, commit, entries = files_of(found[1], found[2] or "main")
    sizes = {path: entry.size for path, entry in entries.items()}
    paths = sorted(path for path in sizes if (fnmatch.fnmatchcase(path, glob) if glob else kind_of(path) != "text"))
    if not paths:
        wanted = f"matches {glob!r}" if glob else "is parquet or JSON lines"
        raise ValueError(f"no file of {name} at {commit[:12]} {wanted}; there are {', '.join(sorted(sizes)[:20])}. "
                         "--glob chooses, as in --glob 'sample/10BT/*.parquet'")
    return Source(f"hf:{name}", commit, [File(f"hf:{name}@{commit}/{path}", sizes[path], 0) for path in paths],
                  f"{given} {glob}")


def files_of(name, revision):
    """(name, commit, {path: what the Hub says of the file}) of a dataset repository."""
    with asking(f"the dataset {name} at {revision}"):
        from huggingface_hub import HfApi

        commit = HfApi().dataset_info(name, revision=revision).sha
        tree = HfApi().list_repo_tree(name, recursive=True, revision=commit, repo_type="dataset")
        return name, commit, {entry.path: entry for entry in tree if hasattr(entry, "size")}  # folders have none


def places_of(given, shards):
    """[(shard, its file as `downloaded` wants it, or '' where there is none)] for rows with file and sha256 in the
    dataset repository owner/name[@revision]: the file with that hash, else one with that name."""
    found = re.fullmatch(ON_THE_HUB, given.removeprefix("hf:"))
    if not found:
        raise ValueError(f"--repair is {given!r}; write owner/name or owner/name@revision, a dataset on the Hub")
    name, commit, entries = files_of(found[1], found[2] or "main")
    by_name = {os.path.basename(path): path for path in sorted(entries, reverse=True)}
    by_hash = {entry.lfs.sha256: path for path, entry in entries.items() if entry.lfs}
    paths = [by_hash.get(shard["sha256"]) or by_name.get(shard["file"]) for shard in shards]
    return [(shard, path and f"hf:{name}@{commit}/{path}") for shard, path in zip(shards, paths)]


def tokenizer_on_the_hub(given):
    """The path of the tokenizer.json of owner/name[@revision], downloaded into the client's cache, or '' where `given`
    names no repository."""
    found = re.fullmatch(ON_THE_HUB, given.removeprefix("hf:"))
    if not found or os.path.exists(given) or given.endswith(".json"):
        return ""
    with asking(f"tokenizer.json of {given} (nor is there a file or folder of that name here)"):
        from huggingface_hub import hf_hub_download

        return hf_hub_download(found[1], "tokenizer.json", revision=found[2])


def fetched(name, folder):
    """The path of a file named as in hub_source, downloaded into the folder, or on with what is there of it; folder ''
    means the client's own cache."""
    repo, commit, path = re.fullmatch(r"hf:([^@]+)@(\w+)/(.+)", name).groups()
    with asking(name):
        from huggingface_hub import hf_hub_download

        return hf_hub_download(repo, path, repo_type="dataset", revision=commit, local_dir=folder or None)


@contextlib.contextmanager
def downloaded(name, folder, coming=None):
    """A context with the path of a file, `coming` where its download has begun; deleted afterwards but from the
    cache."""
    local = coming and coming.result()
    local = local or fetched(name, folder)  # where it failed: once more, and then it is said
    yield local
    if folder:
        Path(local).unlink(missing_ok=True)  # it may have been moved to its place


class Ahead:
    """The files of datasets, in the order of a build: called with a name it is `downloaded`, and meanwhile the next one
    comes, so that two at most are on this disk."""

    def __init__(self, names, folder):
        self.names, self.folder, self.coming, self.place = names, folder, (None, None), -1

    @contextlib.contextmanager
    def __call__(self, name):
        self.place = self.names.index(name, self.place + 1 if name in self.names[self.place + 1:] else 0)
        named, coming = self.coming
        with downloaded(name, self.folder, coming if named == name else None) as local:
            following = self.names[self.place + 1:][:1]
            self.coming = (following[0], self.begin(following[0])) if following not in ([], [name]) else (None, None)
            yield local

    def begin(self, name):
        """Lets a download begin that a process which ends does not wait for; its result is '' where it failed."""
        coming = concurrent.futures.Future()

        def work():
            path = ""
            with contextlib.suppress(OSError, ValueError):  # said where the file is wanted
                path = fetched(name, self.folder)
            coming.set_result(path)

        threading.Thread(target=work, daemon=True).start()
        return coming


@contextlib.contextmanager
def asking(what):
    """Turns every failure of the Hub and of the way to it into an OSError that says what was asked for."""
    try:
        yield
    except ImportError:
        raise ValueError(f"{what} needs the package huggingface_hub: pip install huggingface_hub") from None
    except Exception as error:  # client, HTTP library and sockets each have their own
        reason = " ".join(str(error).split())[:300]
        raise OSError(f"the Hub did not give {what}: {type(error).__name__}: {reason}. HF_TOKEN is needed for what is "
                      "private or gated") from None
