"""A local file system: atomic creation, direct I/O, what POSIX promises."""
