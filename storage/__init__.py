"""Where bytes live: one small ``Store`` protocol over local disk and object stores."""
