"""Measure what a micro-batch costs on the machine that runs this."""

from prefect import flow
from prefect.runtime import flow_run

from configs.settings import Settings
from dflash_core.throughput import CostModel
from tasks import calibrate as measuring
from tasks.inspect_target import inspect_target
from tasks.places.run_folder import open_run_folder
from tasks.prepare import prepare_corpus
from tasks.train import training_job

__all__ = ["calibrate"]


@flow(name="calibrate", retries=0)
def calibrate(settings: Settings) -> CostModel:
    """Time target and drafter on the corpus's lengths; later runs here reuse what is found."""
    inspect_target(settings)
    name = str(flow_run.name or "calibrate")
    with open_run_folder(settings.run, default_name=name) as folder:
        corpus = prepare_corpus(settings, folder)
        job = training_job(settings, corpus, folder)
        return measuring.calibrate(job, folder).cost
