"""Input files as ordered rows, and the rows as tokens on disk."""
