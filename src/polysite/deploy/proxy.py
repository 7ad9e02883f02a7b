"""The proxy through which a hospital connects out: section ``[proxy]`` of its site.toml.

The proxy is asked by HTTP CONNECT for a tunnel to the coordinator; TLS goes through the tunnel from end to end.
"""

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from polysite.errors import ConfigError, DataError, nearest


@dataclass(frozen=True)
class Proxy:
    """A proxy for outgoing connections.

    Args:
        host: Host of the proxy.
        port: Port of the proxy.
        login: user:password, or empty; never printed.
        file: File that the login is from.
    """

    host: str
    port: int
    login: str = field(default="", repr=False)
    file: Path | None = None

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a request for a tunnel."""
        if not self.login:
            return {}
        return {"Proxy-Authorization": f"Basic {b64encode(self.login.encode()).decode('ascii')}"}

    @classmethod
    def parse(cls, given: Mapping[str, Any], home: Path) -> "Proxy | None":
        """Parse the section ``[proxy]`` of a site.toml in the folder ``home``; None if it is empty."""
        if not given:
            return None
        for key, value in given.items():
            if key not in ("url", "login"):
                raise ConfigError(f"[proxy] has an unknown key {key!r}; {nearest(key, ('url', 'login'))}")
            if not isinstance(value, str) or not value:
                raise ConfigError(f"[proxy] {key} must be a text that is not empty")
        if "url" not in given:
            raise ConfigError('[proxy] has no url, as in url = "http://proxy.example.org:3128"')
        host, port = _address(given["url"])
        file = home / Path(given["login"]).expanduser() if "login" in given else None
        return cls(host, port, _login(file) if file else "", file)


def _address(url: str) -> tuple[str, int]:
    """Return host and port of a proxy.

    >>> _address("http://proxy.example.org:3128")
    ('proxy.example.org', 3128)
    """
    shape = 'as in "http://proxy.example.org:3128"'
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as problem:
        raise ConfigError(f"[proxy] url is not an address, {shape}") from problem
    if parts.username is not None or parts.password is not None:
        raise ConfigError("[proxy] url holds a login; put it into the file that login names")
    if parts.scheme != "http" or not parts.hostname or not port or parts.path.strip("/") or parts.query:
        raise ConfigError(f"[proxy] url = {url!r} must be http://HOST:PORT, {shape}")
    return parts.hostname, port


def _login(file: Path) -> str:
    """Return the login of a file; no message ever holds it."""
    try:
        login = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"the login of the proxy, {file}, cannot be read: {type(problem).__name__}") from problem
    if ":" not in login or not login.isprintable():
        raise ConfigError(f"{file} must hold the login of the proxy as USER:PASSWORD in one line")
    return login
