"""Tokenizers: text to token ids and back.

load_tokenizer makes the one that a data manifest or a model.json names: 'bytes', an encoding of tiktoken, the
tokenizer.json of the library tokenizers that lies beside it, or none, where text is ids.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
from pathlib import Path

import numpy as np

LARGEST_VOCAB = 1 << 16  # of uint16 ids
END_OF_TEXT = b"<|endoftext|>"
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")  # looked for in a tokenizer.json

BYTES = {"kind": "bytes", "name": "bytes",
         "sha256": hashlib.sha256(b"ids 0-255 are the bytes of UTF-8, 256 is eot").hexdigest(), "eot": 256}
GPT2 = {"kind": "tiktoken", "name": "gpt2",
        "sha256": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930", "eot": 50256}
NO_TOKENIZER = {"kind": "none", "name": "", "sha256": "", "eot": -1}


class Tokenizer:
    """Text to token ids and back; load_tokenizer makes one."""
    file = ""  # the tokenizer.json

    def __init__(self, identity, texts, specials, encode_bytes):
        self.identity = identity  # the manifest's "tokenizer"
        self.eot = identity["eot"]
        self.vocab_size = len(texts)
        self.encode_bytes = encode_bytes  # UTF-8 as bytes -> integer array of ids, never a special one
        self._texts = texts
        self._specials = specials

    def later_ids(self, data):
        """The ids of a text that goes on after another one, without what may be put in front of a text."""
        return self.encode_bytes(data)

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


def load_tokenizer(identity, vocab_size=0, file=""):
    """The tokenizer that a manifest or model.json names; kind 'none', whose text is ids, needs vocab_size, and kind
    'tokenizer.json' the file.

    Raises ValueError where it is unknown, out of reach, or not the one whose sha256 is recorded ('': any).
    """
    kind, name, recorded = identity["kind"], identity["name"], identity["sha256"]
    if kind == "bytes":
        tokenizer = byte_tokenizer()
    elif kind == "tiktoken":
        tokenizer = tiktoken_tokenizer(name)
    elif kind == "tokenizer.json":
        tokenizer = json_tokenizer(file, identity)
    elif kind == "none":
        tokenizer = id_tokenizer(vocab_size)
    else:
        raise ValueError(f"tokenizer kind {kind!r} is not known here; 'bytes', 'tiktoken', 'tokenizer.json' and 'none' "
                         "are")
    if recorded not in ("", tokenizer.identity["sha256"]):
        raise ValueError(f"tokenizer {name!r} is not the one the data was made with: its sha256 is "
                         f"{tokenizer.identity['sha256']}, recorded is {recorded}")
    return tokenizer


def named_tokenizer(word, vocab_size=0, end=""):
    """The tokenizer named on the command line: bytes, none, an encoding of tiktoken, or the path of a tokenizer.json
    or of its folder, in which `end` ends a document."""
    known = {"bytes": BYTES, "gpt2": GPT2, "none": NO_TOKENIZER}
    file = os.path.join(word, "tokenizer.json") if os.path.isdir(word) else word
    if word not in known and (os.path.isfile(file) or word.endswith(".json")):
        return json_tokenizer(file, {"eot": -1}, (end,) if end else ENDS_OF_TEXT)
    if end:
        raise ValueError(f"--end-of-text goes with a tokenizer.json; {word} has an end of text of its own")
    return load_tokenizer(known.get(word, {"kind": "tiktoken", "name": word, "sha256": ""}), vocab_size)


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


# -- tokenizer.json


def json_tokenizer(file, identity, ends=ENDS_OF_TEXT):
    """The tokenizer of a tokenizer.json; its sha256 is that of the file, its name tells no path.

    Its end of text is id identity["eot"], where that is -1 the first of `ends` that it has.
    """
    try:
        import tokenizers
    except ImportError:
        raise ValueError("a tokenizer.json needs the package tokenizers: pip install tokenizers") from None
    try:
        content = Path(file).read_bytes()
        library = tokenizers.Tokenizer.from_str(content.decode())
    except OSError as error:
        raise ValueError(f"the tokenizer.json of this vocabulary cannot be read ({error}); copy it there") from None
    except Exception as error:  # the library raises nothing more special for what it cannot read
        raise ValueError(f"{file} is no tokenizer.json that tokenizers {tokenizers.__version__} can read: "
                         f"{error}") from None
    library.no_padding()  # what a file may ask for, and would change or cut the text
    library.no_truncation()
    if getattr(library.model, "dropout", None):
        library.model.dropout = None  # the same ids each time
    library.encode_special_tokens = True  # text must not be able to end a document
    vocabulary = library.get_vocab()
    vocab_size = max(vocabulary.values()) + 1
    if vocab_size > LARGEST_VOCAB:
        raise ValueError(f"{file} has {vocab_size:,} ids and uint16 shards hold at most {LARGEST_VOCAB:,}; use a "
                         "smaller one, or 'prepare.py train-tokenizer' makes one of a size that you choose")
    eot = end_of_text(file, library, vocabulary, ends) if identity["eot"] < 0 else identity["eot"]
    parts = json.loads(content)
    kind = parts["model"].get("type") or "tokenizer"
    identity = {"kind": "tokenizer.json", "name": f"{kind.lower()}-{vocab_size}",
                "sha256": hashlib.sha256(content).hexdigest(), "eot": eot}
    tokenizer = LibraryTokenizer(identity, library, vocab_size, "ByteLevel" in json.dumps(parts.get("decoder")))
    tokenizer.file = str(file)
    return tokenizer


def end_of_text(file, library, vocabulary, ends):
    """The id that ends a document. Raises ValueError where there is none, or where text could contain it."""
    special = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    for text in ends:
        if text in vocabulary and text in special:
            return vocabulary[text]
    raise ValueError(f"{file} has no end-of-text token: none of {', '.join(ends)} is among its special tokens "
                     f"({', '.join(sorted(special)) or 'it has none'}); --end-of-text names one of them")


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the library tokenizers. Where its ids are not bytes of the text, the library decodes, and the
    bytes of an id are not known."""

    def __init__(self, identity, library, vocab_size, is_byte_level):
        added = library.get_added_tokens_decoder()
        specials = {i for i, token in added.items() if token.special}
        letters, texts = byte_letters(), []
        for i in range(vocab_size):
            text = library.id_to_token(i) or ""
            in_letters = is_byte_level and i not in added and all(c in letters for c in text)
            texts.append(bytes(letters[c] for c in text) if in_letters else text.encode())
        super().__init__(identity, texts, specials, self.library_ids)
        self.library, self.is_byte_level = library, is_byte_level

    def library_ids(self, data):
        text, end = data.decode("utf-8", "replace"), self.library.id_to_token(self.eot)
        ids = self.library.encode(text, add_special_tokens=False).ids
        if self.eot in ids:  # some vocabularies hold it as a word like others: text must not be able to end a document
            first, *others = text.split(end)
            parts = [first + end[:1], *(end[1:] + part + end[:1] for part in others[:-1]), end[1:] + others[-1]]
            ids = [i for part in parts for i in self.library.encode(part, add_special_tokens=False).ids]
            if self.eot in ids:
                raise ValueError(f"the tokenizer makes its end of text {end!r} out of a text without it")
        return np.array(ids, np.int64)

    def later_ids(self, data):
        before = b"a" if data[:1].isspace() else b"\n"  # what the text is not joined to
        lead, ids = self.library_ids(before), self.library_ids(before + data)
        return ids[len(lead):] if ids[:len(lead)].tolist() == lead.tolist() else self.library_ids(data)

    def decode(self, ids):
        if self.is_byte_level:
            return super().decode(ids)
        return self.library.decode([i for i in ids if i < self.vocab_size], skip_special_tokens=False)

    def token_bytes(self):
        return super().token_bytes() if self.is_byte_level else np.zeros(self.vocab_size, np.int64)


def byte_letters():
    """{letter: byte} of the alphabet in which byte-level vocabularies are written: GPT-2's."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def train_bpe(texts, vocab_size):
    """A byte-level BPE of vocab_size ids, its end of text among them, as the text of a tokenizer.json.

    Raises ValueError for a size that cannot be.
    """
    if not 257 <= vocab_size <= LARGEST_VOCAB:
        raise ValueError(f"--vocab-size is {vocab_size:,}; wanted are at least 257, for the 256 bytes and the end of "
                         f"text, and at most {LARGEST_VOCAB:,}, which uint16 shards can hold")
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ValueError("train-tokenizer needs the package tokenizers: pip install tokenizers") from None
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # with GPT-2's pattern
    library.decoder = decoders.ByteLevel()
    alphabet, end = pre_tokenizers.ByteLevel.alphabet(), END_OF_TEXT.decode()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=[end],
                                  show_progress=False)
    library.train_from_iterator(texts, trainer)
    return library.to_str(pretty=True)
