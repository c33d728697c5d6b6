"""What every error of ours is."""

from __future__ import annotations

from typing import ClassVar


class EverstateError(Exception):
    """Anything everstate refuses, or cannot do, that a caller may want to handle."""

    retryable: ClassVar[bool] = False
    exit_code: int = 1
    http_status: ClassVar[int] = 500
    unsaid: ClassVar[str] = "an error of everstate's own; its log has it."
    """What an answer over HTTP says where the message is not for strangers."""

    def __init__(
        self, message: str, *, advice: str | None = None, public: str | None = None
    ) -> None:
        """``public`` is what strangers may read in place of the message; see :attr:`public`."""
        super().__init__(message)
        self.advice = advice
        self._public = public

    @property
    def public(self) -> str:
        """What an answer over HTTP says of it.

        A request that is refused learns the whole reason. What goes wrong on our side names
        addresses, logins and files in its message, so an answer has only what was written for it.
        """
        if self._public is not None:
            return self._public
        return self.message if self.http_status < 500 else self.unsaid

    @property
    def public_advice(self) -> str | None:
        """The advice, where :attr:`public` is about this very error."""
        return self.advice if self._public is not None or self.http_status < 500 else None

    @property
    def message(self) -> str:
        """The sentence without the advice."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.message} {self.advice}" if self.advice else self.message
