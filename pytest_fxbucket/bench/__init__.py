"""Step time: measured on the ranks, interleaved, and compared with runs that were stored."""
