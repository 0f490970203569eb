"""What a job needs beside its weights to go on: random numbers, data, counters."""
