"""DSpark's own part of a cache: manifest fields and the target's weights."""
