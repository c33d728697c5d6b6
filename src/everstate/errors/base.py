"""What every error of ours is."""

from __future__ import annotations

from typing import ClassVar


class EverstateError(Exception):
    """Anything everstate refuses, or cannot do, that a caller may want to handle."""

    retryable: ClassVar[bool] = False
    exit_code: int = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, advice: str | None = None) -> None:
        super().__init__(message)
        self.advice = advice

    @property
    def message(self) -> str:
        """The sentence without the advice."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.message} {self.advice}" if self.advice else self.message
