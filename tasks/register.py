"""Export, record and register a drafter."""

import json
import shutil
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.settings import Settings
from dflash_core.artifacts import atomic_write
from dflash_core.corpus.masking.encoding import encoder_in
from dflash_core.corpus.store import TokenStore
from dflash_core.decoding.report import AcceptanceReport
from dflash_core.export.write import export_drafter
from dflash_core.profiling import LengthProfile
from dflash_core.training.drafter import load_checkpoint_drafter
from tasks.places.run_folder import RunFolder
from tasks.report import environment
from tasks.tracking.registry import PROFILE_NAME, add_version
from tasks.tracking.run import TrackedRun

__all__ = ["register"]


@task(name="register", cache_policy=NO_CACHE)
def register(
    settings: Settings,
    folder: RunFolder,
    drafter: Path,
    acceptance: AcceptanceReport,
    run: TrackedRun,
    store: Path,
    profile: LengthProfile,
) -> str:
    """Write the export with its manifest and make it a version of the registered model."""
    corpus = TokenStore.open(store).content_hash
    encoder = encoder_in(store)
    encoded = {} if encoder is None else encoder.model_dump()
    run.log_params({"encoder": encoded})
    made_of = {
        "encoder": encoded or None,
        "environment": environment(),
        "corpus": corpus,
        **acceptance.metrics,
        "settings": json.loads(settings.model_dump_json()),
    }
    shutil.rmtree(folder.export, ignore_errors=True)
    export_drafter(load_checkpoint_drafter(drafter), folder.export, manifest=made_of)
    run.log_files(atomic_write(folder.path / PROFILE_NAME, profile.to_json()))
    measured = {name: f"{value:.4f}" for name, value in acceptance.metrics.items()}
    tags = {**measured, "flow_run": folder.name, "corpus": corpus}
    tags |= {f"encoder_{name}": value for name, value in encoded.items()}
    version = add_version(run, folder.export, settings.tracking, tags=tags)
    return f"{settings.tracking.model_name} version {version} (challenger)"
