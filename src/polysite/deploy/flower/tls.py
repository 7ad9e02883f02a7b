"""TLS of both ends: each shows a certificate, and trusts only the authority of the federation."""

import ssl
from pathlib import Path

from polysite.errors import RunError


def tls_context(side: int, certificate: Path, key: Path, ca: Path) -> ssl.SSLContext:
    """Return the TLS context of a side (``ssl.PROTOCOL_TLS_SERVER`` or ``_CLIENT``), which shows this certificate and
    requires one of the federation's CA."""
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(ca)
    except OSError as problem:
        raise RunError(f"{ca} cannot be read as the certificate of the consortium's CA: {problem}") from problem
    try:
        context.load_cert_chain(certificate, key)
    except OSError as problem:
        raise RunError(f"{certificate} and {key} are not a certificate and its key: {problem}") from problem
    return context
