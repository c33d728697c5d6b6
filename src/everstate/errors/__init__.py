"""One tree of errors: each says what happened, carries its data, and tells the next step.

``retryable`` is a fact of the class: the same call may succeed later without anybody changing
anything. ``exit_code`` is what the command line returns, ``http_status`` what the API answers.
Foreign errors (psycopg, librdkafka, Spark) are translated into this tree once, in the room that
is the driver's home.
"""

from everstate.errors.base import (
    EverstateError,
)
from everstate.errors.commands import (
    CommandParked,
    CommandTimedOut,
    InvalidCommand,
    ProcessFailed,
    Rejected,
    StateStoreFailed,
)
from everstate.errors.declarations import (
    InvalidCapture,
    InvalidConfig,
    InvalidEntityType,
    InvalidView,
    UnknownCapture,
    UnknownEntity,
    UnknownView,
    WrongSource,
)
from everstate.errors.entities import (
    ChangeTooLarge,
    ImportFailed,
    InvalidChange,
    InvalidQuery,
    MissingProvenance,
    NotFound,
    VersionConflict,
)
from everstate.errors.log import (
    CorruptRecord,
    DataLoss,
    DeliveryFailed,
    LogError,
    LogIdentityChanged,
    RecordRefused,
)
from everstate.errors.outbox import (
    ChainBroken,
    FactNotKept,
    NotAllowed,
    NotRegistered,
    ReplicationFailed,
    ReplicationUnavailable,
    SlotLost,
)
from everstate.errors.pipeline import (
    ArchiveError,
    ArchiveFull,
    CaptureFailed,
    HeldOverflow,
    LocalStateError,
    PipelineError,
    PositionMoved,
    SparkLost,
    VerificationFailed,
    ViewFailed,
    ViewStoreError,
)
from everstate.errors.requests import (
    AlreadyExists,
    EventConflict,
    IdempotencyKeyReused,
    InvalidBody,
    InvalidRequest,
    PreconditionFailed,
    RequestTooLarge,
    Unauthenticated,
    UnsupportedMediaType,
)
from everstate.errors.servers import (
    Fenced,
    LocalStackError,
    RoleEnded,
    SourceError,
    Unavailable,
)

__all__ = [
    "AlreadyExists",
    "ArchiveError",
    "ArchiveFull",
    "CaptureFailed",
    "ChainBroken",
    "ChangeTooLarge",
    "CommandParked",
    "CommandTimedOut",
    "CorruptRecord",
    "DataLoss",
    "DeliveryFailed",
    "EventConflict",
    "EverstateError",
    "FactNotKept",
    "Fenced",
    "HeldOverflow",
    "IdempotencyKeyReused",
    "ImportFailed",
    "InvalidBody",
    "InvalidCapture",
    "InvalidChange",
    "InvalidCommand",
    "InvalidConfig",
    "InvalidEntityType",
    "InvalidQuery",
    "InvalidRequest",
    "InvalidView",
    "LocalStackError",
    "LocalStateError",
    "LogError",
    "LogIdentityChanged",
    "MissingProvenance",
    "NotAllowed",
    "NotFound",
    "NotRegistered",
    "PipelineError",
    "PositionMoved",
    "PreconditionFailed",
    "ProcessFailed",
    "RecordRefused",
    "Rejected",
    "ReplicationFailed",
    "ReplicationUnavailable",
    "RequestTooLarge",
    "RoleEnded",
    "SlotLost",
    "SourceError",
    "SparkLost",
    "StateStoreFailed",
    "Unauthenticated",
    "Unavailable",
    "UnknownCapture",
    "UnknownEntity",
    "UnknownView",
    "UnsupportedMediaType",
    "VerificationFailed",
    "VersionConflict",
    "ViewFailed",
    "ViewStoreError",
    "WrongSource",
]
