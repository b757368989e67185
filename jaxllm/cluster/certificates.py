"""Mutual TLS for JAX's coordinator, by a certificate that all processes of a run derive from their secret.

JAX takes the paths of a certificate, its key and a CA; each end requires that the CA has signed the other's certificate. Here
one certificate is both: a process is taken if it has the key, and it has the key if it has the secret. No file travels.

The certificate is X.509 in DER (RFC 5280, RFC 5480), signed by ECDSA on the curve P-256 (FIPS 186-5, SP 800-186). Python's own
library makes none, and `cryptography` would be a dependency. The time of this arithmetic depends on the key, but each start has
a key of its own, which signs one certificate here. Handshakes are the business of JAX's TLS library.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os

P = 2**256 - 2**224 + 2**192 + 2**96 - 1
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
BASE = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
"""P-256: points (x, y) with y^2 = x^3 - 3 x + b modulo P, and one whose multiples are ORDER points."""

INTEGER, BITS, BYTES, TEXT, UTC, TIME, SEQUENCE, SET, URI, EXPLICIT = 2, 3, 4, 12, 23, 24, 48, 49, 0x86, 0xA0
"""Tags of DER."""
ECDSA_SHA256, EC_KEY, P256 = map(bytes.fromhex, ("06082a8648ce3d040302", "06072a8648ce3d0201", "06082a8648ce3d030107"))
COMMON_NAME, ALTERNATIVE_NAMES = map(bytes.fromhex, ("0603550403", "0603551d11"))
"""Object identifiers, in DER."""
PREFIX = "jaxllm://run/"
"""The certificate's name: a coordinator's address may be none of its host's names, so that JAX compares this instead."""


def arguments(secret: bytes, salt: str) -> dict[str, str]:
    """Arguments of jax.distributed.initialize. The files are in this process's memory (Linux), and end with it."""
    paths = []
    for content in certificate_and_key(secret, salt):
        descriptor = os.memfd_create("jaxllm")
        os.write(descriptor, content)
        paths.append(f"/proc/self/fd/{descriptor}")
    certificate, key = paths
    return {"mtls_cert_file": certificate, "mtls_key_file": key, "mtls_ca_file": certificate, "mtls_peer_uri_prefix": PREFIX}


def certificate_and_key(secret: bytes, salt: str) -> tuple[bytes, bytes]:
    """In PEM; the same for the same arguments."""
    texts = (f"jaxllm certificate 1 {purpose} {salt}".encode() for purpose in ("key", "signature"))
    # From 1 to ORDER - 1, each as likely: the remainder of 512 bits is negligibly uneven.
    key, once = (1 + int.from_bytes(hmac.digest(secret, text, "sha512")) % (ORDER - 1) for text in texts)
    x, y = multiply(key, BASE)
    point = _der(BITS, b"\0\4", x.to_bytes(32), y.to_bytes(32))
    curve, algorithm = _der(SEQUENCE, EC_KEY, P256), _der(SEQUENCE, ECDSA_SHA256)
    name = _der(SEQUENCE, _der(SET, _der(SEQUENCE, COMMON_NAME, _der(TEXT, b"jaxllm"))))
    # The clocks of hosts may differ, and no key outlives its run.
    valid = _der(SEQUENCE, _der(UTC, b"000101000000Z"), _der(TIME, b"99991231235959Z"))
    names = _der(SEQUENCE, ALTERNATIVE_NAMES, _der(BYTES, _der(SEQUENCE, _der(URI, PREFIX.encode()))))
    head = (_der(EXPLICIT, _integer(2)), _integer(1), algorithm, name, valid, name, _der(SEQUENCE, curve, point))
    body = _der(SEQUENCE, *head, _der(EXPLICIT + 3, _der(SEQUENCE, names)))
    certificate = _der(SEQUENCE, body, algorithm, _der(BITS, b"\0", _signature(body, key, once)))
    private = _der(SEQUENCE, _integer(1), _der(BYTES, key.to_bytes(32)), _der(EXPLICIT + 1, point))
    return _pem("CERTIFICATE", certificate), _pem("PRIVATE KEY", _der(SEQUENCE, _integer(0), curve, _der(BYTES, private)))


def multiply(number: int, point: tuple[int, int]) -> tuple[int, int]:
    """The sum of `number` times the point; 0 < number < ORDER."""
    result = point
    for bit in f"{number:b}"[1:]:
        result = _add(result, result)
        if bit == "1":
            result = _add(result, point)
    return result


def _add(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    """The sum of two points of which neither is the other's negative, as in `multiply`."""
    (x1, y1), (x2, y2) = one, other
    slope = (3 * x1 * x1 - 3) * pow(2 * y1, -1, P) if one == other else (y2 - y1) * pow(x2 - x1, -1, P)
    x = (slope * slope - x1 - x2) % P
    return x, (slope * (x1 - x) - y1) % P


def _signature(content: bytes, key: int, once: int) -> bytes:
    """ECDSA. `once` is secret, and serves for this content alone."""
    r = multiply(once, BASE)[0] % ORDER
    s = pow(once, -1, ORDER) * (int.from_bytes(hashlib.sha256(content).digest()) + r * key) % ORDER
    return _der(SEQUENCE, _integer(r), _integer(s))


def _der(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content).to_bytes(2).lstrip(b"\0")
    return bytes([tag]) + (size if len(content) < 128 else bytes([0x80 + len(size)]) + size) + content


def _integer(value: int) -> bytes:
    return _der(INTEGER, value.to_bytes(value.bit_length() // 8 + 1))


def _pem(kind: str, der: bytes) -> bytes:
    return f"-----BEGIN {kind}-----\n".encode() + base64.encodebytes(der) + f"-----END {kind}-----\n".encode()
