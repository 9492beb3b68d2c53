"""One precompute run: its settings, its input, its pipeline."""
