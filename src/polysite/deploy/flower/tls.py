"""TLS of both ends: each shows a certificate, and trusts only the authority of the federation."""

import ssl
from pathlib import Path

from polysite.errors import RunError


def tls_context(side: int, certificate: Path, key: Path, ca: Path, proxy: Path | None = None) -> ssl.SSLContext:
    """Return the TLS context of a side (``ssl.PROTOCOL_TLS_SERVER`` or ``_CLIENT``), which shows this certificate and
    requires one of the federation's CA, or of a proxy that opens TLS."""
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    for path, whose in ((ca, "the consortium's CA"), (proxy, "the proxy's CA")):
        try:
            if path is not None:
                context.load_verify_locations(path)
        except OSError as problem:
            raise RunError(f"{path} cannot be read as the certificate of {whose}: {problem}") from problem
    try:
        context.load_cert_chain(certificate, key)
    except OSError as problem:
        raise RunError(f"{certificate} and {key} are not a certificate and its key: {problem}") from problem
    return context
