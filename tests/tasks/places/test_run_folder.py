"""The folder of a run, found again by whatever a flow run is called."""

from pathlib import Path

from configs.settings import RunConfig
from tasks.places.run_folder import open_run_folder


def opened(root: Path, flow_run_name: str) -> str:
    with open_run_folder(RunConfig(root=root), default_name=flow_run_name) as folder:
        assert folder.path.parent == root and folder.path.is_dir()
        return folder.name


def test_a_flow_run_of_any_name_has_a_folder_that_settings_can_name(tmp_path: Path) -> None:
    texts = [
        "my run",
        "my-run",
        "my-run\n",
        "lr 3e-4 (again)",
        "../up",
        ".lock",
        "",
        "\u5b9e\u9a8c",
        "x" * 300,
        "mlflow",
    ]
    names = [opened(tmp_path, text) for text in texts]
    assert len(set(names)) == len(texts) and names[1] == "my-run"
    assert [RunConfig(name=name).name for name in names] == names
    assert [opened(tmp_path, text) for text in texts] == names, "the same name resumes"
