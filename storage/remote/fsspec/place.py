"""Where the objects of a store are: a root that a driver reaches, and a folder below it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dtckpt.errors import StorageError
from dtckpt.interrupts import raised_by_signal_handler

from ...names import check_component, check_name, check_prefix, join
from ..asking import Connection
from ..trouble import Kind, Trouble, remote_error, told, without_secrets
from .driver import Driver


@dataclass(frozen=True, slots=True)
class Place:
    """A folder of what a driver reaches, its root if ``prefix`` is empty."""

    driver: Driver
    prefix: str = ""

    @property
    def url(self) -> str:
        """For messages."""
        return join(self.driver.url, self.prefix)

    def inside(self, prefix: str) -> Place:
        """Return a folder in this one."""
        return replace(self, prefix=join(self.prefix, check_name(prefix)))

    def beside(self, name: str) -> Place:
        """Return the folder called ``name`` in the same parent; ``StorageError`` if it has none."""
        check_component(name)
        parent, _, own = self.prefix.rpartition("/")
        if own:
            return replace(self, prefix=join(parent, name))
        return Place(self.driver.beside(name))

    def around(self) -> Place | None:
        """Return the folder that this one is in; None where there is none."""
        if self.prefix:
            return replace(self, prefix=self.prefix.rpartition("/")[0])
        driver = self.driver.around()
        return None if driver is None else Place(driver)

    def at(self, name: str, *, reserved: bool = False) -> tuple[Connection, str, str]:
        """Return the connection, the driver's path of an object, and its URL for messages."""
        check_name(name, reserved=reserved)
        connection, root = self.connect()
        path = f"{root}/{join(self.prefix, name)}"
        self.driver.dialect.check_path(path)
        return connection, path, join(self.url, name)

    def below(self, prefix: str) -> tuple[Connection, str, str, int]:
        """Return the connection, its path of ``prefix``, how keys in it begin, and names in keys.

        Keys are the driver's paths without leading slashes, in which drivers differ.
        """
        check_prefix(prefix)
        connection, root = self.connect()
        connection.fs.invalidate_cache()
        base = f"{root}/{self.prefix}".strip("/")
        top = f"{root}/{join(self.prefix, prefix)}".rstrip("/")
        self.driver.dialect.check_path(top)
        below = join(base, prefix).strip("/") + "/"
        return connection, top, below, len(base) + 1 if base else 0

    def connect(self) -> tuple[Connection, str]:
        """Return this process's connection, and its path of the root; ``StorageError`` if none."""
        try:
            return self.driver.get()
        except Exception as error:
            if raised_by_signal_handler(error):
                raise
            if isinstance(error, ModuleNotFoundError):
                raise StorageError(
                    f"cannot connect to {self.url}: its driver needs the module {error.name}, "
                    "which is not installed: pip install it"
                ) from error
            shown, trouble = without_secrets(error), told(error)
            if trouble.kind in (Kind.MISSING, Kind.CONDITION):
                trouble = Trouble(Kind.OTHER)  # it is no object that is missing
            raise remote_error("connect to", self.url, shown, trouble) from shown
