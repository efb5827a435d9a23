"""Export, record and register a drafter."""

import json
import shutil
from pathlib import Path
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.settings import Settings
from dflash_core.decoding import AcceptanceReport
from dflash_core.export import load_drafter
from dflash_core.export.write import export_drafter
from tasks.run_folder import RunFolder
from tasks.tracking import TrackedRun, register_drafter

__all__ = ["register"]


@task(name="register", cache_policy=NO_CACHE)
def register(
    settings: Settings,
    folder: RunFolder,
    drafter: Path,
    acceptance: AcceptanceReport,
    run: TrackedRun,
    facts: dict[str, Any],
) -> str:
    """Write the export with its manifest and make it a version of the registered model."""
    made_of = {**facts, "settings": json.loads(settings.model_dump_json())}
    shutil.rmtree(folder.export, ignore_errors=True)
    export_drafter(load_drafter(drafter), folder.export, manifest=made_of)
    return register_drafter(
        run,
        folder.export,
        name=settings.tracking.model_name,
        alias="challenger",
        tags={"tau": f"{acceptance.tau:.4f}", "flow_run": folder.name},
    )
