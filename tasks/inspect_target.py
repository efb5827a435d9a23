"""Look at the target before anything is spent on it."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from configs.settings import Settings
from dflash_core.decoding.cache import check_together
from dflash_core.draft.build import draft_spec
from dflash_core.errors import ConfigError
from dflash_core.target.loading import load_target
from tasks.console import announce

__all__ = ["inspect_target"]


@task(name="inspect-target", cache_policy=NO_CACHE)
def inspect_target(settings: Settings) -> str:
    """Load the target, check that the drafter fits it, and return it in words.

    Raises:
        TargetError: The folder is no target model, its layers do not fit, or what is trained could
            not be evaluated as the settings say.
        DraftError: The drafter's settings do not fit the target.
        ConfigError: It is not a drafter that would be trained.
    """
    if settings.training.objective == "target":
        raise ConfigError(
            "training.objective is 'target', but a flow calibrates, trains and registers drafters; "
            "set it to 'draft', or train the target with dflash-flow train"
        )
    target = load_target(settings.target)
    draft_spec(settings.draft, target)
    check_together(target, max(settings.evaluation.batch_sizes))
    parameters = sum(parameter.numel() for parameter in target.model.parameters())
    words = (
        f"{settings.target.path.name} ({type(target.model).__name__}, {parameters / 1e6:.1f} M "
        f"parameters, {target.num_layers} layers, features from {list(target.layer_ids)})"
    )
    announce(f"target: {words}")
    return words
