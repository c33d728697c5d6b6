"""Translates options of librdkafka to those of Kafka's Java client, which reads the log in Spark.

The two clients share few names of security options, and each ignores unknown options: an option
that was not translated would silently have no effect. So each security option is translated, or
refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from everstate.errors import HIDDEN, InvalidConfig

Options = Mapping[str, str]

_SAME: Final = (
    "client.dns.lookup",
    "client.rack",
    "request.timeout.ms",
    "sasl.kerberos.service.name",
    "security.protocol",
)
_KEYSTORE: Final = ("ssl.keystore.location", "ssl.keystore.password", "ssl.key.password")
_PEM: Final = ("ca", "certificate", "key")
_TRANSLATED: Final = frozenset(
    {
        *(f"ssl.{what}.{form}" for what in _PEM for form in ("location", "pem")),
        "enable.ssl.certificate.verification",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.password",
        "sasl.username",
        "ssl.endpoint.identification.algorithm",
        *_KEYSTORE,
    }
)
_SECURITY: Final = ("enable.sasl.", "enable.ssl.", "https.ca.", "sasl.", "security.", "ssl.")
_JAAS: Final = "sasl.jaas.config"
_CERTIFICATE: Final = re.compile(
    "-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL
)
_KEY: Final = re.compile("-----BEGIN PRIVATE KEY-----.+?-----END PRIVATE KEY-----", re.DOTALL)


def java_options(options: Options, own: Options) -> dict[str, str]:
    """Options for Java: those of ``options`` translated, then ``own`` as they are.

    PEM files are read here and passed as text, so that no worker needs the files. Raises
    InvalidConfig for a security option that has no counterpart, unless ``own`` is given: then
    the user has configured the Java client explicitly.
    """
    java = {name: options[name] for name in _SAME if name in options}
    if not any(name.startswith("ssl.truststore.") for name in own):
        java |= _trust(options)
    if not any(name.startswith("ssl.keystore.") for name in own):
        java |= _identity(options)
    if not own:
        _refuse_the_rest(options)
    return {**java, **_login(options, own), **own}


def _trust(options: Options) -> dict[str, str]:
    """Which certificates the client trusts, and whether it verifies the server's name."""
    java = {}
    if options.get("enable.ssl.certificate.verification", "true").lower() != "true":
        raise _refused(
            "enable.ssl.certificate.verification",
            "true, because Java's client always verifies certificates",
        )
    if (authorities := _pem(options, "ca")) is not None:
        certificates = _CERTIFICATE.findall(authorities)
        if not certificates:
            raise _refused("ssl.ca.location", "a PEM file with certificates")
        java = {
            "ssl.truststore.type": "PEM",
            "ssl.truststore.certificates": "\n".join(certificates),
        }
    name = "ssl.endpoint.identification.algorithm"
    if name in options:
        java[name] = "" if options[name] == "none" else options[name]
    return java


def _identity(options: Options) -> dict[str, str]:
    """Who the client is: a certificate and its key, or a keystore."""
    chain, key = _pem(options, "certificate"), _pem(options, "key")
    if chain is None and key is None:
        keystore = {name: options[name] for name in _KEYSTORE if name in options}
        return {"ssl.keystore.type": "PKCS12", **keystore} if keystore else {}
    found = _KEY.search(key or "")
    if found is None:
        raise _refused(
            "ssl.key.location",
            "a PEM file with a key in PKCS#8 without a password, which Java 17 cannot read "
            "(openssl pkcs8 -topk8 -nocrypt -in key.pem -out pkcs8.pem), or ssl.keystore.… in "
            "log.java_options",
        )
    certificates = _CERTIFICATE.findall(chain or "")
    if not certificates:
        raise _refused("ssl.certificate.location", "a PEM file with the certificate of the key")
    return {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": "\n".join(certificates),
        "ssl.keystore.key": found[0],
    }


def _login(options: Options, own: Options) -> dict[str, str]:
    """SASL mechanism, and user and password as a JAAS line."""
    mechanism = options.get("sasl.mechanism", options.get("sasl.mechanisms"))
    if mechanism is None and "sasl" not in options.get("security.protocol", "").lower():
        return {}
    if _JAAS in own:
        return {} if mechanism is None else {"sasl.mechanism": mechanism}
    if mechanism is None or not mechanism.startswith(("PLAIN", "SCRAM-")):
        # librdkafka's default is GSSAPI.
        raise _refused(
            "sasl.mechanism", f"PLAIN or SCRAM-…, or {_JAAS} for Java in log.java_options"
        )
    module = "scram.ScramLoginModule" if mechanism[0] == "S" else "plain.PlainLoginModule"
    user, password = (
        options.get(name, "").replace("\\", "\\\\").replace('"', '\\"')
        for name in ("sasl.username", "sasl.password")
    )
    line = f'org.apache.kafka.common.security.{module} required username="{user}" '
    return {"sasl.mechanism": mechanism, _JAAS: f'{line}password="{password}";'}


def _pem(options: Options, what: str) -> str | None:
    """PEM text of an option, or of the file that it names; ``None``: neither is given."""
    if f"ssl.{what}.pem" in options:
        return options[f"ssl.{what}.pem"]
    name = f"ssl.{what}.location"
    if name not in options:
        return None
    try:
        return Path(options[name]).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        reason = cause.strerror if isinstance(cause, OSError) else "it is not a text file"
        raise _refused(name, f"a PEM file that can be read ({reason})") from cause


def _refuse_the_rest(options: Options) -> None:
    for name in options:
        if name.startswith(_SECURITY) and name not in _TRANSLATED and name not in _SAME:
            raise _refused(
                name,
                "an option that Java's client has too, or Java's own option in log.java_options",
            )


def _refused(name: str, expected: str) -> InvalidConfig:
    return InvalidConfig(f"log.options[{name!r}]", HIDDEN, f"for Spark {expected}")
