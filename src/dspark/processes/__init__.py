"""Who takes part in a run, who may write, and how all end together."""
