"""The errors dspark raises on purpose.

    DsparkError(ValueError)
        CacheError      a cache on disk is missing, unfinished, damaged or not the one asked for
        DataError       an input file, split or option cannot be read as conversations
            RowError    one row cannot become a training row; carries a countable reason
        TargetError     the target model cannot be used, or its states cannot be trusted

Every one is a ``ValueError``: callers of the functions on the API pages match on that. What is
missing on disk is a ``FileNotFoundError`` instead.
"""


class DsparkError(ValueError):
    """Base of every error that dspark raises on purpose."""


class CacheError(DsparkError):
    """A cache on disk is missing, unfinished, damaged or not the one asked for."""


class DataError(DsparkError):
    """An input file, split or option cannot be read as conversations."""


class RowError(DataError):
    """One row of the input cannot become a training row.

    Attributes:
        reason: A short phrase without values ("no assistant turn"); skipped rows are counted by it.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type["RowError"], tuple[str, str]]:
        # The default would call the class with the joined message alone; workers send these back.
        return (type(self), (self.reason, self.detail))


class TargetError(DsparkError):
    """The target model cannot be used, or its hidden states cannot be trusted."""
