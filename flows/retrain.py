"""Scheduled retraining: train on what is new, promote what is better."""

from typing import Any

from prefect import State, flow
from prefect.runtime import flow_run
from prefect.states import Completed

from configs.settings import Settings
from dflash_core.config import changed
from flows.train_drafter import train_drafter
from tasks.places.run_folder import open_run_folder
from tasks.prepare import prepare_corpus
from tasks.profile import profile_lengths
from tasks.promote import challenge, check_judgeable, find_champion, is_news, with_champion

__all__ = ["retrain"]


@flow(name="retrain", retries=0)
def retrain(settings: Settings) -> str | State[Any]:
    """Train from the champion when the corpus has changed, and let the better one serve.

    Ends in ``Completed(name="Skipped")`` without new data, and as `train_drafter` ended when that
    rejected everything or failed.
    """
    config = changed(settings.run, {"name": None})
    with open_run_folder(config, default_name=str(flow_run.name or "retrain")) as folder:
        corpus = prepare_corpus(settings, folder)
        champion = find_champion(settings, folder)
        if not is_news(settings, folder, champion, corpus.train):
            return Completed(name="Skipped", message="no new data since the last training")
        check_judgeable(settings, corpus.held_out)
        profile = profile_lengths(corpus.train, folder, dask=settings.run.dask)
        started = with_champion(settings, champion, profile)
        state: State[Any] = train_drafter(started, return_state=True)
        if not state.is_completed():
            return state
        return challenge(settings, folder, champion, state.result(), corpus.held_out)
