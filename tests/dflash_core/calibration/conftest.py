from tests.dflash_core.training.conftest import make_job, parts

__all__ = ["make_job", "parts"]
