"""Chats to token stores."""

import os
from contextlib import ExitStack

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.settings import Settings
from dflash_core.corpus.answers.regenerate import Generate
from dflash_core.corpus.build import (
    CorpusReport,
    Regenerated,
    answers_facts,
    build_corpus,
    regenerate_corpus,
    source_digest,
)
from dflash_core.corpus.config import CorpusConfig
from dflash_core.corpus.masking.encoder import ChatEncoder
from dflash_core.corpus.masking.encoding import encoder_in
from dflash_core.corpus.masking.loading import load_encoder
from dflash_core.decoding.regeneration import chosen_generate
from dflash_core.reporting import CorpusFacts
from dflash_core.target.loading import Target, load_target, target_digest
from tasks.console import announce, progress
from tasks.launching.gpu_pool import decoding_device
from tasks.places.keys import alone, cached_path
from tasks.places.remote import with_local_inputs
from tasks.places.run_folder import RunFolder

__all__ = ["corpus_facts", "prepare_corpus"]


@task(name="prepare-corpus", cache_policy=NO_CACHE)
def prepare_corpus(settings: Settings, folder: RunFolder) -> CorpusReport:
    """Build the corpus, or find the one made of the same chats, target, settings and code."""
    config = with_local_inputs(settings.corpus, folder)
    target = target_digest(settings.target.path)
    encoder = load_encoder(
        settings.target.path, config, trust_remote_code=settings.target.trust_remote_code
    )
    facts = source_digest(config), encoder.digest, target
    out = cached_path(folder, "corpus", config.model_dump(mode="json"), *facts)

    with alone(folder, out.name):
        reused = (out / "corpus.json").is_file()
        regenerated = None
        if config.regenerate.enabled and not reused:
            regenerated = _regenerate(settings, config, folder, encoder, target)
        report = build_corpus(config, encoder, out, regenerated=regenerated)
    facts = corpus_facts(settings, report)
    announce(
        f"corpus: {facts.num_train:,} samples, {facts.num_held_out:,} held out, "
        f"{facts.num_regenerated:,} answers by the target{' (reused)' if reused else ''}"
    )
    return report


def _regenerate(
    settings: Settings, config: CorpusConfig, folder: RunFolder, encoder: ChatEncoder, target: str
) -> Regenerated:
    """Have the target answer, or find what it said to the same; only meanwhile a slot is held."""
    facts = answers_facts(config, encoder, target)
    out = cached_path(folder, "answers", facts)
    with alone(folder, out.name), ExitStack() as held:
        on_progress = held.enter_context(progress("answers regenerated"))

        def load() -> Target:
            device = held.enter_context(decoding_device(settings))
            return load_target(settings.target, device=device)

        def generate() -> Generate:
            key = os.environ.get("OPENAI_API_KEY")
            return chosen_generate(config, encoder, load, api_key=key)

        return regenerate_corpus(
            config,
            encoder,
            out / "regenerated.jsonl",
            generate=generate,
            facts=facts,
            on_progress=on_progress,
        )


def corpus_facts(settings: Settings, report: CorpusReport) -> CorpusFacts:
    """Return the counts that the report page shows."""
    regenerated, train = report.regenerated, report.prepared
    encoder = encoder_in(report.train)
    return CorpusFacts(
        source=settings.corpus.source,
        num_train=train.num_samples,
        num_held_out=report.prepared_held_out.num_samples,
        num_regenerated=regenerated.num_regenerated if regenerated else 0,
        num_kept=regenerated.num_kept if regenerated else train.num_samples,
        num_cut_off=regenerated.num_cut_off if regenerated else 0,
        num_truncated=train.num_truncated,
        num_rejected=train.num_rejects + (regenerated.num_passed_over if regenerated else 0),
        num_duplicates=train.num_duplicates,
        num_leaks=train.num_leaks,
        encoder=encoder.digest if encoder else "",
        thinking=encoder.thinking if encoder else "",
    )
