"""The tree of errors: one class, one exit code, one HTTP status.

    OnejobError                 1   500
      UsageError                2   400   a command's arguments don't make sense
      JobFileError              2   400   the job file has mistakes (all of them, at once)
      NotFoundError             3   404   a run, artifact, ref, request or endpoint that isn't there
      DataError                 4   422   the data is not what the job says it is
        SourceError             4   422   a source is missing, empty, truncated or of another type
        ExpectationError        4   422   an expectation of [data] doesn't hold
      StepError                 5   500   a step failed
        StepTimeoutError        5   504   a step ran past its limit
        RankError               5   500   a rank of a gang died, or never arrived
      StoreError                6   500   the ledger or the blobs can't be used
        DamagedError            6   500   bytes that don't match their digest
        StorageFullError        6   507   no space left
        LeaseLostError          6   409   somebody else holds the work by now
      ConflictError             7   409   the thing is held by somebody else
        PortInUseError          7   409
      UnavailableError          8   501   an engine, executor or plugin can't run here
      InferenceError            9   500   a model could not answer
        BadRequestError         9   400   a request that a model can't take
        ModelCodeError          9   500   a model's own code raised
        OverloadedError         9   503   the queue is full
        DeadlineError           9   504   the answer wasn't there in time
      CancelledError           10   499   stopped by a person

Raise these for the user's mistakes and the world's faults; `assert` for ours.
"""

from __future__ import annotations

from typing import ClassVar


class OnejobError(Exception):
    """The root: a message that names the place and the value, and a cure.

    `retryable` says whether doing the same thing again may succeed.
    """

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, place: str = "", cure: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.cure = cure

    def __str__(self) -> str:
        text = f"{self.place}: {self.message}" if self.place else self.message
        if not self.cure:
            return text
        return f"{text} {self.cure}" if text.endswith((".", "?", "!", ":", "\n")) else f"{text}. {self.cure}"

    def to_json(self) -> dict[str, str]:
        """The error as data: class, place, message, cure; `from_json` makes it again."""
        return {
            "error": type(self).__name__,
            "place": self.place,
            "message": self.message,
            "cure": self.cure,
        }


class UsageError(OnejobError):
    """A command's arguments don't make sense."""

    exit_code = 2
    http_status = 400


class JobFileError(OnejobError):
    """The job file has mistakes; `mistakes` holds one line for each, and all are reported at once."""

    exit_code = 2
    http_status = 400

    def __init__(self, mistakes: list[str], *, place: str = "", cure: str = "") -> None:
        super().__init__("\n".join(mistakes), place=place, cure=cure)
        self.mistakes = mistakes

    def __str__(self) -> str:
        return self.message


class NotFoundError(OnejobError):
    """A run, artifact, ref, request or endpoint that isn't there."""

    exit_code = 3
    http_status = 404


class DataError(OnejobError):
    """The data is not what the job says it is."""

    exit_code = 4
    http_status = 422


class SourceError(DataError):
    """A source is missing, empty, truncated, or a column has another type."""


class ExpectationError(DataError):
    """An expectation of [data] doesn't hold; the message shows the rows that broke it."""


class StepError(OnejobError):
    """A step failed."""

    exit_code = 5


class StepTimeoutError(StepError):
    """A step ran past its time limit."""

    http_status = 504


class RankError(StepError):
    """A rank of a gang died, or never arrived."""

    retryable = True


class StoreError(OnejobError):
    """The ledger or the blobs can't be used."""

    exit_code = 6


class DamagedError(StoreError):
    """Bytes that don't match their digest."""


class StorageFullError(StoreError):
    """No space is left where onejob keeps its things."""

    http_status = 507


class LeaseLostError(StoreError):
    """Somebody else holds the work by now; what was done under the old lease is dropped."""

    http_status = 409


class ConflictError(OnejobError):
    """The thing is held by somebody else."""

    exit_code = 7
    http_status = 409


class PortInUseError(ConflictError):
    """The port of an endpoint is taken by another process."""


class UnavailableError(OnejobError):
    """An engine, executor or plugin can't run here; the cure says what would help."""

    exit_code = 8
    http_status = 501


class InferenceError(OnejobError):
    """A model could not answer."""

    exit_code = 9


class BadRequestError(InferenceError):
    """A request that a model can't take."""

    http_status = 400


class ModelCodeError(InferenceError):
    """What a user's model raised: in its own words."""


class OverloadedError(InferenceError):
    """The queue of a model is full."""

    http_status = 503
    retryable = True


class DeadlineError(InferenceError):
    """The answer wasn't there in time."""

    http_status = 504
    retryable = True


class CancelledError(OnejobError):
    """Stopped by a person."""

    exit_code = 10
    http_status = 499


def from_json(data: dict[str, str]) -> OnejobError:
    """The error that `to_json` wrote; an unknown class comes back as `StepError`."""
    found = {cls.__name__: cls for cls in _tree(OnejobError)}.get(data.get("error", ""), StepError)
    message, place, cure = data.get("message", ""), data.get("place", ""), data.get("cure", "")
    if issubclass(found, JobFileError):
        return found(message.split("\n"), place=place, cure=cure)
    return found(message, place=place, cure=cure)


def _tree(cls: type[OnejobError]) -> list[type[OnejobError]]:
    return [cls, *(deeper for child in cls.__subclasses__() for deeper in _tree(child))]
