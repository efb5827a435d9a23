"""All settings of a run, and how they are found: file < environment < command line.

Every stage owns its section; this module composes them. The same models are the flows'
parameters, so the Prefect UI shows them as forms. Paths in a file are relative to that file.
"""

import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from configs.addresses import without_secrets
from dflash_core.config import FrozenModel
from dflash_core.corpus.config import CorpusConfig
from dflash_core.decoding.config import EvaluationConfig
from dflash_core.draft.config import DraftConfig, LossConfig
from dflash_core.errors import ConfigError
from dflash_core.planning.config import BatchingConfig, Mixing
from dflash_core.target.config import TargetConfig
from dflash_core.throughput.gate import GateConfig
from dflash_core.training.config import TrainingConfig, check_consumers

__all__ = [
    "NAME_PATTERN",
    "CompareConfig",
    "CorpusSettings",
    "RetrainConfig",
    "RunConfig",
    "Settings",
    "TrackingConfig",
    "load_sections",
    "load_settings",
]

S = TypeVar("S", bound="CorpusSettings")

ENV_PREFIX = "DFLASH_"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
# What runs share under their root.
SHARED_FOLDERS = ("cache", "launches", "locks", "mlflow")


class RunConfig(FrozenModel):
    """Where a run keeps what it makes."""

    name: str | None = Field(default=None, pattern=NAME_PATTERN)
    """Folder of the run under root; the flow run's name, in plain letters, when not given. The same
    name resumes."""
    root: Path = Path("runs")
    """Folder for runs, cached artifacts and the tracking database."""
    min_free_gb: float = Field(default=1.0, ge=0)
    """Least free space under root at the start of a run, in gigabytes."""
    warm_start: Path | None = None
    """A drafter in z-lab layout to start from; fresh weights when not given."""
    calibration: Path | None = None
    """Cost model of an earlier calibration to use; one of another machine or model is refused."""
    calibrate_again: bool = False
    """Whether to measure this machine anew even if a calibration of it is kept."""
    concurrency_limit: str | None = Field(default=None, min_length=1)
    """Global concurrency limit held while torchrun runs, so that deployments share GPUs in turn."""
    slot_wait_s: float = Field(default=86_400.0, gt=0)
    """Longest wait for a slot of that limit."""
    torchrun_limit_s: float | None = Field(default=None, gt=0)
    """Longest time of one torchrun; its ranks save and end then. No limit when not given."""
    silence_limit_s: float = Field(default=3_600.0, gt=0)
    """Longest time in which torchrun's ranks neither print a line nor finish a step."""
    fetch_limit_s: float = Field(default=3_600.0, gt=0)
    """Longest time for one answer or one object of object storage to arrive."""
    nodes: int = Field(default=1, ge=1)
    """Machines that torchrun runs on; the others run dflash-flow join."""
    rendezvous: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*:\d{1,5}$")
    """Where several machines meet: HOST:PORT of the one that runs the flow; its own full name and
    port 29400 when not given."""
    meeting_limit_s: int = Field(default=600, ge=1)
    """Longest wait of a machine for the others, whole seconds."""
    dask: str | None = Field(default=None, pattern=r"^(local|[a-z]+://[A-Za-z0-9.:\[\]-]+)$")
    """Address of a Dask scheduler that shares out profiling, or 'local' for processes here."""

    @field_validator("name")
    @classmethod
    def _is_a_folder_of_its_own(cls, name: str | None) -> str | None:
        if name in SHARED_FOLDERS:
            raise ValueError(
                f"name '{name}' is a folder that all runs under a root share "
                f"({', '.join(SHARED_FOLDERS)}); set run.name to another"
            )
        return name

    @model_validator(mode="after")
    def _calibrations_do_not_contradict(self) -> "RunConfig":
        if self.calibrate_again and self.calibration is not None:
            raise ValueError(
                f"calibration {self.calibration} is to be used and calibrate_again asks to measure "
                "anew; set one of run.calibration and run.calibrate_again"
            )
        return self


class CompareConfig(FrozenModel):
    """Which strategies compete."""

    strategies: tuple[str, ...] = ("sorted", "random", "bucketed", "pooled")
    """Registered strategies to compare."""
    mixings: tuple[Mixing, ...] = ("diverse",)
    """Mixings to compare each strategy with."""


class TrackingConfig(FrozenModel):
    """Where results are recorded."""

    model_config = ConfigDict(hide_input_in_errors=True)

    uri: str | None = None
    """MLflow server or database without a password; when not given, MLFLOW_TRACKING_URI of the
    process, and a SQLite file under run.root when that is not set either."""
    experiment: str | None = None
    """Experiment; named after the target when not given."""
    patience_s: float = Field(default=600.0, ge=0)
    """How long to wait for an MLflow that is away where its answer is needed: to register."""
    model_name: str = Field(default="dflash-drafter", min_length=1)
    """Registered model that new drafters become versions of."""

    @field_validator("uri")
    @classmethod
    def _holds_no_password(cls, uri: str | None) -> str | None:
        if uri and without_secrets(uri) != uri:
            # From here the value would reach parameters, manifests and MLflow itself.
            raise ValueError(
                "the address holds a password, and settings are recorded with every run; set "
                "MLFLOW_TRACKING_URI in the environment of the worker instead",
            )
        return uri


class RetrainConfig(FrozenModel):
    """When a retrained drafter takes over."""

    promote_by: Literal["tau", "speedup"] = "tau"
    """What a challenger must beat the champion in: acceptance length, or wall-clock speed-up of
    whole requests at the first of evaluation.batch_sizes."""
    min_gain: float = Field(default=0.01, ge=0)
    """By how much, in units of the same."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """Confidence with which it must do so, by a paired bootstrap over prompts or timed batches."""
    min_speedup: float = Field(default=0.0, ge=0)
    """Least measured speed-up of a drafter that is promoted, the first one too; 1 refuses any that
    is slower than plain decoding."""
    max_drift: float = Field(default=0.05, ge=0, le=1)
    """Largest distance of length distributions up to which the champion's edges are kept."""


class CorpusSettings(FrozenModel):
    """What encoding and answering chats depends on."""

    target: TargetConfig
    """The target model."""
    corpus: CorpusConfig = CorpusConfig()
    """The training data."""


class Settings(CorpusSettings):
    """One run from chats to a registered drafter."""

    run: RunConfig = RunConfig()
    """Where results go."""
    batching: BatchingConfig = BatchingConfig()
    """Limits and settings of the planner."""
    compare: CompareConfig = CompareConfig()
    """Which strategies compete."""
    draft: DraftConfig = DraftConfig()
    """Shape of the drafter."""
    loss: LossConfig = LossConfig()
    """Loss of the drafter."""
    gate: GateConfig = GateConfig()
    """What a strategy must reach."""
    training: TrainingConfig = TrainingConfig()
    """The training run."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """How acceptance is measured."""
    tracking: TrackingConfig = TrackingConfig()
    """Where results are recorded."""
    retrain: RetrainConfig = RetrainConfig()
    """When a retrained drafter takes over."""

    @model_validator(mode="after")
    def _speed_is_measured_where_it_counts(self) -> "Settings":
        counts = self.retrain.promote_by == "speedup" or self.retrain.min_speedup > 0
        if counts and not self.evaluation.compare_plain:
            raise ValueError(
                f"retrain.promote_by '{self.retrain.promote_by}' with retrain.min_speedup "
                f"{self.retrain.min_speedup:g} needs a speed-up, which evaluation.compare_plain "
                "false leaves unmeasured; set it to true"
            )
        return self

    @model_validator(mode="after")
    def _fit_together(self) -> "Settings":
        budget, longest = self.batching.token_budget, self.corpus.max_length
        if budget < longest:
            raise ValueError(
                f"batching.token_budget {budget:,} is under corpus.max_length {longest:,}, so the "
                "longest sample would fit no micro-batch; raise the one or lower the other"
            )
        check_consumers(self.batching, self.training.topology)
        return self


def load_settings(file: Path | None = None, overrides: Sequence[str] = ()) -> Settings:
    """Read settings from a TOML file, ``DFLASH_SECTION__FIELD`` variables and command-line words.

    Args:
        file: TOML file; its relative paths are taken from its own folder.
        overrides: Words such as ``["--training.epochs", "2"]``.

    Raises:
        ConfigError: Missing or malformed file, an unknown option or variable.
        pydantic.ValidationError: A value is unknown or out of range.
    """
    return load_sections(Settings, file, overrides)


def load_sections(kind: type[S], file: Path | None = None, overrides: Sequence[str] = ()) -> S:
    """Read some sections of the settings, as `load_settings` does; a file may hold the others too.

    Args:
        kind: The sections.
        file: TOML file.
        overrides: Words of these sections.

    Raises:
        ConfigError: Missing or malformed file, an unknown option or variable.
        pydantic.ValidationError: A value is unknown or out of range.
    """
    from_file = _read_toml(file) if file else {}
    others = Settings.model_fields.keys() - kind.model_fields.keys()
    _check_environment(os.environ)

    class Sources(kind, BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix=ENV_PREFIX,
            env_nested_delimiter="__",
            cli_avoid_json=False,
        )

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            command_line = CliSettingsSource(
                settings_cls,
                cli_parse_args=list(overrides),
                cli_exit_on_error=False,
                cli_implicit_flags=True,
            )
            return command_line, _Environment(settings_cls), init_settings

    try:
        merged = Sources(**{k: v for k, v in from_file.items() if k not in others})
    except SettingsError as error:
        raise _config_error(str(error)) from None
    return kind.model_validate(merged.model_dump())


class _Environment(EnvSettingsSource):
    """Takes lists as a,b too, as the command line does; what is neither fails its field's check."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        try:
            return super().decode_complex_value(field_name, field, value)
        except ValueError:
            if value.startswith(("[", "{")):
                return value
            return [part.strip() for part in value.split(",")]


def _config_error(text: str) -> ConfigError:
    words = text.removeprefix("error parsing CLI: ").strip()
    return ConfigError(words[0].lower() + words[1:] if words else "settings cannot be read")


def _read_toml(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"there is no settings file {file}; give an existing one with --config")
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from None
    return _resolve_paths(Settings, data, file.resolve().parent)


def _resolve_paths(model: type[BaseModel], data: dict[str, Any], base: Path) -> dict[str, Any]:
    """Return the data with every relative path, where the model expects one, joined to base."""
    resolved = dict(data)
    for name, value in data.items():
        field = model.model_fields.get(name)
        if field is None:
            continue
        section = _model_in(field.annotation)
        if section is not None and isinstance(value, dict):
            resolved[name] = _resolve_paths(section, value, base)
        elif _holds_path(field.annotation):
            resolved[name] = (
                [_join(base, item) for item in value]
                if isinstance(value, list)
                else _join(base, value)
            )
    return resolved


def _join(base: Path, value: Any) -> Any:
    """Return a path joined to base; an address such as s3://bucket/chats stays as it is."""
    return value if not isinstance(value, str) or "://" in value else str(base / value)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _holds_path(annotation: Any) -> bool:
    return annotation is Path or any(_holds_path(inner) for inner in get_args(annotation))


def _check_environment(environment: Mapping[str, str]) -> None:
    """Refuse a misspelt section or delimiter, which pydantic-settings would ignore."""
    prefix, sections = ENV_PREFIX.lower(), Settings.model_fields
    for name in environment:
        if not name.lower().startswith(prefix):
            continue
        section, nested, _ = name.lower().removeprefix(prefix).partition("__")
        if nested and section not in sections:
            known = ", ".join(sections)
            raise ConfigError(
                f"the environment sets {name}, but there is no section '{section}'; "
                f"sections are {known}"
            )
        meant, _, field = section.partition("_")
        # Kubernetes sets DFLASH_RUN_PORT and the like where there is a service named dflash-run.
        if field and meant in sections and not field.startswith(("port", "service_")):
            raise ConfigError(
                f"the environment sets {name}, which is no setting; two underscores stand between "
                f"section and field: {ENV_PREFIX}{meant.upper()}__{field.upper()}"
            )
