"""Errors a user can meet, as a tree.

::

    DFlashError
    ├── InputError            what was given cannot be used            exit code 2
    │   ├── ConfigError       a setting is unknown, out of range or contradicts another
    │   ├── DataError         a chat file, token file or length list cannot be read as such
    │   ├── ArtifactError     something on disk is missing, damaged or of another format version
    │   ├── PlanError         no epoch plan satisfies the limits
    │   ├── TargetError       the target folder is no causal language model that can be used
    │   ├── DraftError        a drafter does not fit its target, or its checkpoint is wrong
    │   └── CalibrationError  measurements cannot be used for this run
    ├── TrainingError         the torchrun program failed              exit code 1
    ├── TrackingError         the tracking server does not answer      exit code 1
    ├── TimeLimitError        something took longer than it may        exit code 1
    └── Interrupted           stopped on request, can be resumed       exit code 4

Every message is one sentence: what, with its value; the limit; the setting that fixes it.
A rejection by the gate is a result, not an error.
"""

__all__ = [
    "ArtifactError",
    "CalibrationError",
    "ConfigError",
    "DFlashError",
    "DataError",
    "DraftError",
    "InputError",
    "Interrupted",
    "PlanError",
    "TargetError",
    "TimeLimitError",
    "TrackingError",
    "TrainingError",
]


class DFlashError(Exception):
    """Base of everything this project raises on purpose."""

    exit_code = 1


class InputError(DFlashError, ValueError):
    """What the user gave cannot be used; the message names the value and the setting."""

    exit_code = 2


class ConfigError(InputError):
    """A setting is unknown, out of range, or contradicts another setting."""


class DataError(InputError):
    """A data file is missing, empty, or does not hold what it should."""


class ArtifactError(InputError):
    """A stored artifact is missing, damaged, or of another kind or format version."""


class PlanError(InputError):
    """No epoch plan exists under the given limits."""


class TargetError(InputError):
    """The target folder cannot be used as a target model."""


class DraftError(InputError):
    """A drafter and its target, or its checkpoint, do not fit together."""


class CalibrationError(InputError):
    """Measurements are missing, degenerate, or belong to other hardware or another model."""


class TrainingError(DFlashError):
    """The training program ended without finishing; the message names the guilty rank."""


class TrackingError(DFlashError):
    """The tracking server does not answer where its answer is needed."""


class TimeLimitError(DFlashError):
    """Something took longer than its setting allows."""


class Interrupted(DFlashError):
    """The run was asked to stop, saved its state, and can be resumed."""

    exit_code = 4
