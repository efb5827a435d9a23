"""Acceptance of a drafter by real speculative decoding, on the corpus's held-out prompts."""

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from configs.settings import Settings
from dflash_core.decoding.report import AcceptanceReport
from dflash_core.errors import ArtifactError
from tasks.evaluate import evaluate
from tasks.places.run_folder import open_run_folder
from tasks.prepare import prepare_corpus
from tasks.promote import find_champion
from tasks.tracking.run import open_tracking

__all__ = ["evaluate_drafter"]


@flow(name="evaluate-drafter", retries=0)
def evaluate_drafter(settings: Settings, drafter: Path | None = None) -> AcceptanceReport:
    """Measure a drafter in z-lab layout, or the champion when none is named.

    Raises:
        ArtifactError: No drafter is named and none is registered as champion.
    """
    name = str(flow_run.name or "evaluate")
    with (
        open_run_folder(settings.run, default_name=name) as folder,
        open_tracking(settings, folder) as run,
    ):
        if drafter is None:
            champion = find_champion(settings, folder)
            if champion is None:
                raise ArtifactError(
                    f"model '{settings.tracking.model_name}' has no champion yet; name a drafter, "
                    "or run the flow retrain first"
                )
            drafter = champion.drafter
        corpus = prepare_corpus(settings, folder)
        report = evaluate(settings, drafter, corpus.held_out)
        run.log_metrics(report.metrics)
        run.log_json("acceptance.json", report.model_dump(mode="json"))
    return report
