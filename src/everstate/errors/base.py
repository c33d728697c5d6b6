"""Base class of all everstate errors."""

from __future__ import annotations

from typing import ClassVar


class EverstateError(Exception):
    """Base class of all errors of everstate."""

    retryable: ClassVar[bool] = False
    exit_code: int = 1
    http_status: ClassVar[int] = 500
    fallback_message: ClassVar[str] = (
        "everstate failed with an internal error; its log has the details."
    )
    """Text of an HTTP answer when the message must not be shown to clients."""

    def __init__(
        self, message: str, *, advice: str | None = None, public: str | None = None
    ) -> None:
        """``public`` is a text for clients, shown instead of the message; see :attr:`public`."""
        super().__init__(message)
        self.advice = advice
        self._public = public

    @property
    def public(self) -> str:
        """The text for an HTTP answer.

        For a refused request it is the whole message. The message of a server-side error may have
        addresses, logins and files, so the answer has only a text that was written for clients.
        """
        if self._public is not None:
            return self._public
        return self.message if self.http_status < 500 else self.fallback_message

    @property
    def public_advice(self) -> str | None:
        """The advice, if :attr:`public` describes this error itself."""
        return self.advice if self._public is not None or self.http_status < 500 else None

    @property
    def message(self) -> str:
        """The sentence without the advice."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.message} {self.advice}" if self.advice else self.message


def described(cause: BaseException) -> str:
    """An error of the project's own code: its class, and what it says if it can be asked."""
    try:
        said = str(cause)
    except BaseException as failure:
        said = f"its text cannot be read ({type(failure).__name__})"
    return f"{type(cause).__name__}: {said}" if said else type(cause).__name__
