"""A FUSE file system with two doors onto one tree: the kernel's mount, and a socket for an agent's tools."""

__version__ = "0.1.0"
