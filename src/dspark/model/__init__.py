"""The frozen model: its parts, its states, its head."""
