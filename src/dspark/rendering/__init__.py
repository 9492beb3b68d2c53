"""A conversation rendered by its chat template, watched, and tokenized once."""
