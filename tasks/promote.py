"""Champion and challenger: what has changed since, and who serves from now on."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.settings import RetrainConfig, Settings
from dflash_core.config import changed
from dflash_core.corpus.store import TokenStore
from dflash_core.decoding.comparison import LEAST_BATCHES, compare_drafters
from dflash_core.decoding.prompts import store_prompts
from dflash_core.decoding.report import AcceptanceReport
from dflash_core.errors import ConfigError
from dflash_core.profiling import LengthProfile, length_drift
from dflash_core.reporting import RunSummary
from tasks.console import announce
from tasks.evaluate import measure
from tasks.places.run_folder import RunFolder
from tasks.tracking.registry import CHALLENGER, CHAMPION, Registered, find_version, set_alias

BEATEN = f"{CHALLENGER}.reason"  # what set_alias writes on a challenger that lost

__all__ = [
    "challenge",
    "check_judgeable",
    "find_champion",
    "is_better",
    "is_news",
    "with_champion",
]


def check_judgeable(settings: Settings, held_out: Path) -> None:
    """Look, before a training, whether its drafter could be held against the champion after it.

    Raises:
        ConfigError: Speed-up decides, and the held-out prompts are too few for an interval of it.
    """
    if settings.retrain.promote_by != "speedup":
        return
    store, size = TokenStore.open(held_out), settings.evaluation.batch_sizes[0]
    count = len(store_prompts(store, max_prompts=settings.evaluation.max_prompts))
    if count < LEAST_BATCHES * size:
        raise ConfigError(
            f"retrain.promote_by 'speedup' times {LEAST_BATCHES} full batches of "
            f"evaluation.batch_sizes[0] {size}, but {count} prompts are held out; begin "
            "evaluation.batch_sizes with a smaller one, or hold out more"
        )


@task(name="find-champion", cache_policy=NO_CACHE)
def find_champion(settings: Settings, folder: RunFolder) -> Registered | None:
    """Return the champion, or None before there is one."""
    return find_version(settings, CHAMPION, folder.cache)


@task(name="look-for-news", cache_policy=NO_CACHE)
def is_news(
    settings: Settings, folder: RunFolder, champion: Registered | None, store: Path
) -> bool:
    """Say whether no champion and no beaten challenger was trained on this corpus."""
    corpus = TokenStore.open(store).content_hash
    if champion is not None and champion.tags.get("corpus") == corpus:
        return False
    challenger = find_version(settings, CHALLENGER, folder.cache)
    if challenger is None:  # whoever promoted the champion by hand may have taken it away
        return True
    return challenger.tags.get("corpus") != corpus or BEATEN not in challenger.tags


@task(name="start-from-champion", cache_policy=NO_CACHE)
def with_champion(
    settings: Settings, champion: Registered | None, profile: LengthProfile
) -> Settings:
    """Return settings that start from the champion; says how far the lengths have drifted."""
    if champion is None:
        return settings
    drift = length_drift(LengthProfile.from_json(champion.profile.read_bytes()), profile)
    limit = settings.retrain.max_drift
    word = "buckets are fitted anew" if drift > limit else "within the limit"
    announce(f"length drift since version {champion.version}: {drift:.3f} ({word}, {limit:g})")
    run = changed(settings.run, {"warm_start": champion.drafter})
    return changed(settings, {"run": run})


@task(name="challenge", cache_policy=NO_CACHE)
def challenge(
    settings: Settings,
    folder: RunFolder,
    champion: Registered | None,
    trained: RunSummary,
    held_out: Path,
) -> str:
    """Hold what was trained against the champion on the same prompts; promote it if it is better.

    Returns:
        Who is champion now, and why.
    """
    challenger = find_version(settings, CHALLENGER, folder.cache)
    if challenger is None or challenger.tags.get("flow_run") != trained.name:
        other = (
            "somebody took the challenger's alias away"
            if challenger is None
            else f"version {challenger.version} of run {challenger.tags.get('flow_run')} became "
            "challenger"
        )
        words = f"{other} meanwhile; {trained.name} is not judged"
        announce(words)
        return words
    assert trained.acceptance is not None
    serving = None if champion is None else measure(settings, champion.drafter, held_out)
    better, figures = is_better(settings.retrain, trained.acceptance, serving)
    if better:
        words = f"version {challenger.version} is champion: {figures}"
        set_alias(settings, CHAMPION, challenger.version, reason=words)
    else:
        stays = "there is no" if champion is None else f"version {champion.version} stays"
        words = f"{stays} champion: {figures}"
        set_alias(settings, CHALLENGER, challenger.version, reason=words)
    announce(words)
    return words


def is_better(
    config: RetrainConfig, challenger: AcceptanceReport, champion: AcceptanceReport | None
) -> tuple[bool, str]:
    """Say whether a challenger is to serve, and why.

    Args:
        config: What counts, and how much of it.
        challenger: What was measured of it.
        champion: What was measured of who serves, None before there is one.

    Raises:
        DataError: The two cannot be compared.
    """
    better, figures = True, f"the first drafter of this model, {challenger.words}"
    if champion is not None:
        gain = compare_drafters(
            challenger, champion, measure=config.promote_by, confidence=config.confidence
        )
        better = gain.is_better_by(config.min_gain)
        figures = (
            f"{gain.measure} {gain.challenger:.3f} against {gain.champion:.3f}, gain "
            f"{gain.gain:+.3f} ({gain.low:+.3f}..{gain.high:+.3f} at {gain.confidence:.0%}), "
            f"margin {config.min_gain:g}; {challenger.words}"
        )
    if (challenger.speedup or 0.0) < config.min_speedup:
        short = "under" if challenger.speedup else "and no full batch was timed for"
        return False, f"{figures}, {short} retrain.min_speedup {config.min_speedup:g}"
    return better, figures
