"""Draws that are a pure function of words: a hash, and a seeded permutation that is evaluated by index."""

import hashlib
import json
import math

import numpy as np


def hash64(*words):
    """A 64-bit integer from words (numbers and text), the same on every machine and version."""
    return int.from_bytes(hashlib.sha256(json.dumps(words).encode()).digest()[:8], "little")


def mix(values, key):
    """Scrambles uint64 `values` under a 64-bit `key`. Source: the finalizer of SplitMix64 (Steele et al., 2014)."""
    x = values + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(indices, n, key):
    """Where a seeded permutation of 0..n-1 takes each of `indices` (uint64 array), in constant memory for any n.

    A Feistel network of 8 rounds over pairs (left, right) with left * b + right = index and a * b just above n; the few
    values that land outside 0..n-1 are sent through again until they land inside (cycle walking), so it is a bijection.
    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002. Frozen by golden values in a test.
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    a, b = np.uint64(a), np.uint64(b)
    keys = [hash64(key, "round", i) for i in range(8)]
    values = np.array(indices, dtype=np.uint64)
    walking = np.arange(len(values))
    while len(walking):
        left, right = np.divmod(values[walking], b)
        for i, round_key in enumerate(keys):
            if i % 2 == 0:
                left = (left + mix(right, round_key) % a) % a
            else:
                right = (right + mix(left, round_key) % b) % b
        values[walking] = left * b + right
        walking = walking[values[walking] >= n]
    return values
