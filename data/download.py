"""Files of a dataset repository on the Hugging Face Hub, one at a time on this disk."""

import contextlib
import fnmatch
import os
import re

from data.sources import File, Source, kind_of


def hub_source(given, glob):
    """The Source of hf:owner/name[@revision]: the files that match glob ('': parquet and JSON lines), by name.

    The revision is resolved to a commit, so that the files stay what they are. Raises ValueError where there are none.
    """
    found = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@(.+))?", given)
    if not found:
        raise ValueError(f"{given!r} names no dataset; write hf:owner/name or hf:owner/name@revision")
    name, revision = found[1], found[2] or "main"
    with asking(f"the dataset {name} at {revision}"):
        from huggingface_hub import HfApi

        commit = HfApi().dataset_info(name, revision=revision).sha
        tree = HfApi().list_repo_tree(name, recursive=True, revision=commit, repo_type="dataset")
        sizes = {entry.path: entry.size for entry in tree if hasattr(entry, "size")}  # folders have none
    paths = sorted(path for path in sizes if (fnmatch.fnmatchcase(path, glob) if glob else kind_of(path) != "text"))
    if not paths:
        wanted = f"matches {glob!r}" if glob else "is parquet or JSON lines"
        raise ValueError(f"no file of {name} at {commit[:12]} {wanted}; there are {', '.join(sorted(sizes)[:20])}. "
                         "--glob chooses, as in --glob 'sample/10BT/*.parquet'")
    return Source(f"hf:{name}", commit, [File(f"hf:{name}@{commit}/{path}", sizes[path], 0) for path in paths])


@contextlib.contextmanager
def downloaded(name, folder):
    """The path of a file named as in hub_source, downloaded into the folder, or on with what is there of it, and
    deleted afterwards; folder '' means the client's own cache, where it stays."""
    repo, commit, path = re.fullmatch(r"hf:([^@]+)@(\w+)/(.+)", name).groups()
    with asking(name):
        from huggingface_hub import hf_hub_download

        local = hf_hub_download(repo, path, repo_type="dataset", revision=commit, local_dir=folder or None)
    yield local
    if folder:
        os.remove(local)


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
