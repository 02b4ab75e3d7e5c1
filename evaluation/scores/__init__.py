"""What a diagnosis scores on the benchmark, and what simpler ones score beside it."""
