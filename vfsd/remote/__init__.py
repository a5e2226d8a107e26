"""Volumes whose files live elsewhere: a tree in memory over a store, blobs or somebody's backend."""
