"""A package, so that no other package named data is found in its place."""
