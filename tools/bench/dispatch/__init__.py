"""One operator call beside torch's DTensor, and beside another checkout of the library."""
