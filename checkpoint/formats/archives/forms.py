"""Forms of a ``Place``: how a chunk lies there. Without one it is in an archive of torch.save."""

from __future__ import annotations

ZSTD = "zstd"
"""An archive that is compressed as a whole."""
IN_SAFETENSORS = "safetensors"
"""A safetensors file, in which the chunk has the name of the record."""
INLINE = "inline"
"""No place at all, but the elements themselves: the record, in base64."""
AS_IT_IS = "as it is"
"""No archive, but the bytes from the first element on."""
