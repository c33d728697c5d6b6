"""The lake for tests, and its rows as delta-rs and DuckDB read them."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import duckdb
from deltalake import DeltaTable

from everstate.archive.layout import options_of
from everstate.config import Config
from everstate.sections import StoresConfig
from everstate.views.stores import lake
from everstate.views.tables import Merge
from kit.served_s3 import ServedS3, address
from kit.served_store import Found, ServedStore
from kit.settings import altered


class ServedLake(ServedStore):
    """A link to a folder, which leads nowhere while the folder is away."""

    name: ClassVar[str] = "lake"
    plain: ClassVar[str] = ""
    secure: ClassVar[str] = ""

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder / "lake", folder / "files"
        self._files.mkdir(exist_ok=True)
        self._lead_to(self._files)

    @classmethod
    @contextmanager
    def alone(cls, folder: Path, *, fsync: bool = True) -> Iterator[Self]:
        """A folder of the caller's own; no process has to be started."""
        yield cls(folder)

    @property
    def url(self) -> str:
        return str(self.folder)

    def settings(self, config: Config, url: str | None = None, **more: Any) -> Config:
        server = config.stores.server(self.name).model_copy(update={"url": url or self.url})
        return config.model_copy(update={"stores": StoresConfig(lake=server)})

    def away(self, config: Config) -> Config:
        """Settings with a folder that cannot be there."""
        return self.settings(config, f"{__file__}/lake")

    @contextmanager
    def own(self) -> Iterator[Config]:
        config = altered(Config(), views={"schema_name": f"t{secrets.token_hex(6)}"})
        yield self.settings(config)

    def start(self) -> None:
        """Let the folder be there again."""
        self._lead_to(self._files)

    def kill(self) -> None:
        """Let it be away, at one moment, as one that is mounted may be."""
        self._lead_to(self._files / "away" / "away")

    def _lead_to(self, place: Path) -> None:
        made = self.folder.with_name("link")
        made.symlink_to(place)
        made.replace(self.folder)

    def refusals(self, config: Config) -> list[AbstractContextManager[None]]:
        return [self._refusing(config)]

    @contextmanager
    def _refusing(self, config: Config) -> Iterator[None]:
        """Files in the place of the folders to which tasks write: they can read, and not write."""
        places = [each / lake._WRITTEN for each in self._root(config).glob("*/_*__v*")]
        for place in places:
            assert list(place.glob("*.parquet")) == []
            shutil.rmtree(place, ignore_errors=True)
            place.touch()
        yield
        for place in places:
            place.unlink()

    def table(self, config: Config, view: str) -> str:
        """The folder of the table that readers of a view see."""
        return str(self._root(config) / view)

    def shown(self, config: Config, view: str) -> str | None:
        """The table of the version that readers of a view see."""
        found = lake.shown_version(self.table(config, view))
        return found and found.partition("@")[0]

    def read(self, config: Config, view: str, merge: Merge = "row") -> list[Found] | None:
        """The rows, after the pipeline's upkeep has shown them."""
        name = self.shown(config, view)
        if name is None:
            return None
        lake._RESTS.clear()
        lake.LakeRows(config).publish(view, name)
        rows = DeltaTable(self.table(config, view)).to_pyarrow_dataset()
        found: list[Found] = duckdb.from_arrow(rows).to_arrow_table().to_pylist()
        return found

    def spoil(self, config: Config, view: str, key: str, column: str, value: str) -> None:
        place = lake.LakeRows(config)._path(self.shown(config, view) or "")
        lake_table = DeltaTable(place, storage_options=options_of(place))
        lake_table.update({column: f"'{value}'"}, predicate=f"_key = '{key}'")

    def left(self, config: Config) -> list[str]:
        root = self._root(config)
        return sorted({str(each.relative_to(root)) for each in root.rglob("*") if each.is_file()})

    def clean(self, config: Config) -> None:
        shutil.rmtree(self._root(config), ignore_errors=True)

    def _root(self, config: Config) -> Path:
        return Path(config.stores.server(self.name).url or "") / config.views.schema_name


class ServedLakeOnS3(ServedLake):
    """A prefix of an object store, whose files are also those of a folder."""

    def __init__(self, server: ServedS3, *, holds_archive: bool = True) -> None:
        self._server, made = server, server.lake()
        self.folder, self._url = made.folder, str(made.settings["path"])
        self._settings = made.settings if holds_archive else server.section()

    @property
    def url(self) -> str:
        return self._url

    @property
    def process(self) -> int:
        return self._server.servers.pid(self._server.name)

    def settings(self, config: Config, url: str | None = None, **more: Any) -> Config:
        return altered(super().settings(config, url, **more), archive=self._settings)

    def away(self, config: Config) -> Config:
        return altered(self.settings(config), archive=self._server.section(endpoint=address(1)))

    def start(self) -> None:
        self._server.start()

    def kill(self) -> None:
        self._server.kill()

    def _root(self, config: Config) -> Path:
        return self.folder / config.views.schema_name
